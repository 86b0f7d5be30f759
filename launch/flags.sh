#!/bin/sh
# Flags of the compiler by chip, for everything that launches a run:
#
#   CHIP=v5p; . launch/flags.sh     # v5e, v5p, v6e, tpu7x, h100, h200; else none
#
# They let collectives run beside products: without them the gathers of a layer may wait
# for the layer before. Flags that are set already come last and win. The compilers accept
# all of them (tests/launch_test.py); nobody timed the gain.
#
# CACHE=/shared/programs, a folder that all hosts see, keeps compiled programs for a
# restart: process 0 writes, all others read.

tpu="--xla_tpu_overlap_compute_collective_tc=true
  --xla_enable_async_all_gather=true
  --xla_enable_async_collective_permute=true
  --xla_tpu_enable_ag_backward_pipelining=true"
# Gradients over data, and over slices, while the backward pass runs.
tpu="$tpu
  --xla_tpu_enable_data_parallel_all_reduce_opt=true
  --xla_tpu_data_parallel_opt_different_sized_ops=true"
# A collective in pieces between the steps of a product.
fused="--xla_tpu_enable_async_collective_fusion=true
  --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
  --xla_tpu_enable_async_collective_fusion_multiple_steps=true"
# SparseCores carry collectives in place of the core that multiplies.
sparse_core="--xla_tpu_enable_async_collective_fusion_fuse_all_gather=false
  --xla_tpu_enable_async_collective_fusion_fuse_all_reduce=false
  --xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter=false
  --xla_tpu_enable_sparse_core_collective_offload_all_gather=true
  --xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true
  --xla_tpu_enable_sparse_core_collective_offload_all_reduce=true
  --xla_tpu_use_tc_device_shape_on_sc=true
  --xla_sc_disable_megacore_partitioning=true"
# The next turn of a scan over layers is fetched in this one.
gpu="--xla_gpu_enable_latency_hiding_scheduler=true
  --xla_gpu_enable_pipelined_all_gather=true
  --xla_gpu_enable_pipelined_reduce_scatter=true
  --xla_gpu_enable_pipelined_all_reduce=true
  --xla_gpu_enable_while_loop_double_buffering=true"

case ${CHIP:-none} in
  v5e) chosen="$tpu $fused" ;;
  v5p) chosen="$tpu $fused --xla_tpu_megacore_fusion_allow_ags=false" ;;
  v6e | tpu7x) chosen="$tpu $sparse_core" ;;
  *) chosen= ;;
esac
# shellcheck disable=SC2086,SC2116  # words, without the line breaks
[ -z "$chosen" ] || LIBTPU_INIT_ARGS=$(echo $chosen ${LIBTPU_INIT_ARGS:-})
# shellcheck disable=SC2086,SC2116
case ${CHIP:-none} in h100 | h200) XLA_FLAGS=$(echo $gpu ${XLA_FLAGS:-}) ;; esac
[ -z "${LIBTPU_INIT_ARGS:-}" ] || export LIBTPU_INIT_ARGS
[ -z "${XLA_FLAGS:-}" ] || export XLA_FLAGS
if [ -n "${CACHE:-}" ]; then
  JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$CACHE}
  export JAX_COMPILATION_CACHE_DIR
fi
