"""Scenarios for the processes of together_test.py and commands_test.py."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import sys
import threading
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import sharding
from glm5_jax.checkpoint import host_copies, shard_file, stored
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.checkpoint import manager as manager_lib
from glm5_jax.inference import commands, engine, leader, placement, prompt_scores
from glm5_jax.model import transformer
from glm5_jax.processes import group, together
from glm5_jax.rl.weight_store import writer
from glm5_jax.serving import new_weights
from glm5_jax.training.run import rows
from glm5_jax.weights import (
    huggingface,
    loading,
    quantized_loading,
    safetensors_file,
)

SHAPE = (16, 8)
AXES = ("a", "b")
FLOATS = [("model.dtype", "float32"), ("model.param_dtype", "float32")]
PROMPT_TOKENS = 16
MOST_TOKENS = 36  # more than two dispatches of an engine
METADATA = {"data": "corpus=1"}


def values(step):
    """Returns the contents of this step's checkpoint."""
    rng = np.random.default_rng(step)
    w = rng.normal(size=(32, 64)).astype(np.float32)
    return {"params": {"w": w, "b": rng.integers(0, 99, 3, np.int32)}}


def abstract_state():
    """Returns its shapes, sharded over all devices and replicated."""
    mesh = make_mesh()
    places = {"w": P("b", "a"), "b": P()}
    return {
        "params": {
            name: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, places[name])
            )
            for name, x in values(0)["params"].items()
        }
    }


def placed(step):
    """Places the contents on the devices of all processes."""
    return jax.tree.map(
        lambda x, like: jax.make_array_from_callback(
            x.shape, like.sharding, lambda index: x[index]
        ),
        values(step),
        abstract_state(),
    )


def assert_equal(state, step):
    """Checks this process's shards bit for bit."""
    for name, want in values(step)["params"].items():
        for shard in state["params"][name].addressable_shards:
            np.testing.assert_array_equal(shard.data, want[shard.index])


def make_mesh():
    """Returns a mesh of all 8 devices as 4 x 2."""
    return jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Auto,) * 2)


def agree(folder):
    """Agrees on values, and on a batch of which each process makes its rows."""
    number = jax.process_index()
    assert together.is_first() == (number == 0)
    assert together.from_first("greeting", lambda: f"I am {number}") == "I am 0"
    assert together.numbers_of_first([4, 7, 9][: 3 - number]) == [4, 7, 9]
    assert together.numbers_of_first([]) == []
    assert together.all_true(True)
    assert not together.all_true(number == 0)
    whole = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    for spec, num_own in ((P("a"), 8), (P("b", "a"), 16), (P("a", "b"), 8), (P(), 16)):
        where = NamedSharding(make_mesh(), spec)
        mine = rows.of_this_process(
            jax.ShapeDtypeStruct(SHAPE, np.int32, sharding=where)
        )
        assert len(mine) == num_own, (spec, mine)
        batch = rows.to_global_arrays({"x": whole[mine]}, where, mine, SHAPE[0])
        assert batch["x"].shape == SHAPE
        for shard in batch["x"].addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])
        np.testing.assert_array_equal(together.whole(batch["x"]), whole)
    manager = manager_lib.CheckpointManager(folder / "saved", keep=3)
    for step in (1, 2):
        manager.save(step, placed(step), METADATA)
    manager.close()
    manager = manager_lib.CheckpointManager(folder / "given", keep=3)
    step, state, metadata = manager.restore(abstract_state())
    assert (step, metadata) == (2, METADATA)
    assert_equal(state, 2)
    manager.close()


def fall_back(folder):
    """Hides step 2 from process 1 only: no process restores it."""
    manager = manager_lib.CheckpointManager(folder / "given", keep=3)
    if jax.process_index() == 1:
        read = stored.read

        def broken(step_folder, *args):
            if step_folder.name == "2":
                raise ValueError("a disk that fails here alone")
            return read(step_folder, *args)

        stored.read = broken
    step, state, _ = manager.restore(abstract_state())
    assert step == 1
    assert_equal(state, 1)
    assert manager.latest_step() == 1
    manager.close()


def go_on(folder):
    """Restores the newest sound step, and saves another."""
    manager = manager_lib.CheckpointManager(folder / "given", keep=9)
    step, state, _ = manager.restore(abstract_state())
    assert_equal(state, step)
    manager.save(step + 1, placed(step + 1), METADATA)
    manager.close()


def copy_state(folder):
    """Each host keeps its copy of two steps; process 1 cannot write the second."""
    copies = host_copies.HostCopies(folder, own_folder(folder))
    copies.save(1, two_slices(1), METADATA)
    copies.save(2, two_slices(2), METADATA)
    copies.wait()
    full = mock.patch.object(shard_file, "write", side_effect=OSError("full"))
    with contextlib.nullcontext() if together.is_first() else full:
        copies.save(3, two_slices(3), METADATA)
        copies.wait()
    copies.close()


def restore_copies(folder):
    """Restores step 2, which one host has, or as many as there are."""
    copies = host_copies.HostCopies(folder, own_folder(folder))
    step, state, metadata = copies.restore(two_slices(0), newer_than=1)
    assert (step, metadata) == (2, METADATA)
    for name, want in values(2)["params"].items():
        for shard in state["params"][name].addressable_shards:
            np.testing.assert_array_equal(shard.data, want[shard.index])
    copies.drop()
    copies.close()


def own_folder(folder):
    """Returns the folder of a host, where one process runs."""
    os.environ["HOST_FOLDER"] = f"{folder}/host{os.environ['JAX_PROCESS_ID']}"
    return "$HOST_FOLDER"


def two_slices(step):
    """Returns a state of which each slice of four devices has a replica."""
    mesh = jax.make_mesh((jax.device_count() // 4, 4), ("data", "fsdp"))
    return jax.tree.map(
        lambda x, spec: jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, spec), lambda index: x[index]
        ),
        values(step),
        {"params": {"w": P("fsdp"), "b": P()}},
    )


def import_shards(folder):
    """Loads a Hugging Face folder, and returns the experts that this process read."""
    reads, read = [], safetensors_file.Tensor._read

    def noted(tensor, file, shape):
        start, out = file.tell(), read(tensor, file, shape)
        reads.append(range(start, file.tell()))
        return out

    safetensors_file.Tensor._read = noted
    config = loading.read_config(loading.find(folder / "release"))
    config = dataclasses.replace(config, param_dtype="float32")
    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(expert=8))
    abstract = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        transformer.abstract_params(config),
        sharding.shardings(transformer.param_dims(config), mesh),
    )
    params = loading.load_params(folder / "release", config, abstract)
    whole = np.load(folder / "whole.npz")
    for path, leaf in leaves_lib.flatten(params)[0].items():
        for shard in leaf.addressable_shards:
            values = np.asarray(shard.data, np.float32)
            np.testing.assert_array_equal(values, whole["/".join(path)][shard.index])
    experts = set()
    found = huggingface.open_params(folder / "release", config, abstract)
    for path, leaf in found.items():
        for index, (tensor, _, _) in leaf.pieces.items() if "experts" in path else ():
            size = np.prod(tensor.shape) * leaf.dtype.itemsize
            mine = range(tensor.offset, tensor.offset + size)
            if any(r.start < mine.stop and mine.start < r.stop for r in reads):
                experts.add(index[-1])
    sys.stdout.write(f"experts {sorted(experts)}\n")


def round_shards(folder):
    """Rounds a release on the way, of which each process reads its experts."""
    seen, read = [], huggingface.StoredLeaf.read

    def noted(leaf, window):
        if leaf._depth == 2:  # layers and experts
            seen.append(range(window[1].start, window[1].stop))
        return read(leaf, window)

    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(expert=8))
    given = folder / "release", FLOATS
    whole = quantized_loading.load_model(*given, scheme="int8")[1]
    huggingface.StoredLeaf.read = noted
    params = quantized_loading.load_model(*given, mesh, "int8")[1]
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True)
    for leaf, want in pairs:
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(want)[shard.index])
    sys.stdout.write(f"experts {sorted({*itertools.chain(*seen)})}\n")


def continue_and_score(folder):
    """Continues and scores rows on a mesh of all devices."""
    path, overrides = str(folder / "chat_model"), [*FLOATS, ("mesh.fsdp", "2")]
    tokens, out = str(folder / "ids.npy"), folder / str(jax.process_count())
    sampling = commands.Sampling(max_new_tokens=MOST_TOKENS, temperature=0.0)
    prompt = commands.Prompt(tokens=str(folder / "two_ids.npy"))
    texts = commands.generate(path, overrides, prompt, sampling, f"{out}_ids")
    logits = f"{out}_logits"
    scores = commands.evaluate(
        path, overrides, tokens=tokens, text=None, logits_out=logits
    )
    first = together.is_first()
    assert (bool(texts), bool(scores)) == (first, first)
    if first:
        pathlib.Path(f"{out}.json").write_text(json.dumps([texts, scores]))
    lead(folder)


def lead(folder):
    """Process 0 alone knows the requests; the others make the same calls."""
    path, overrides = folder / "chat_model", [*FLOATS, ("mesh.fsdp", "2")]
    mesh, overrides = loading.mesh_of(overrides)
    config, params, _ = quantized_loading.load_model(path, overrides, mesh)
    is_alone = jax.process_count() == 1
    make = leader.Leader if together.is_first() else leader.Member
    make = engine.Engine if is_alone else make
    # Those of continue_and_score, for the same programs.
    capacity = engine.bucket(PROMPT_TOKENS + MOST_TOKENS)
    limits = engine.Limits.of_prompts(1, 0)
    sizes = {"num_slots": 2, "capacity": capacity, "limits": limits}
    with placement.using(mesh):
        made = make(params, config, **sizes)
    if not together.is_first():
        leader.follow(made)
        return
    rows = np.load(folder / "ids.npy").tolist()
    asked = [
        engine.Request(0, rows[0], 18, temperature=0.0),
        engine.Request(1, rows[1], MOST_TOKENS, top_p=0.9),
        engine.Request(2, rows[2], MOST_TOKENS),
    ]
    completions = [made.submit(request) for request in asked]
    made.step()
    made.step()
    made.abort(2)
    while made.num_pending:
        made.step()
    scores, _ = made.everywhere(prompt_scores.of, rows)
    with contextlib.suppress(config_lib.InputError):  # which ends nobody
        made.everywhere(prompt_scores.of, [[10**6, 1]])
    drawn = [[x.tokens, x.logprobs] for x in completions]
    if is_alone:  # which runs first
        others = jax.tree.map(lambda x: 1.5 * x, jax.device_get(made.placed_params[0]))
        writer.Writer(folder / "store").publish(others, 3)
    last = new_weights.Last()
    coming = new_weights.begin(made, folder / "store" / "i0000-v000000003", last)
    coming.wait()
    coming.publish(made, 3)
    later = made.submit(engine.Request(3, rows[0], 18, temperature=0.0))
    while made.num_pending:
        made.step()
    assert later.versions == [3] * 18, later.versions
    drawn.append([later.tokens, later.logprobs])
    with contextlib.suppress(config_lib.InputError):  # no version of a store
        new_weights.begin(made, folder / "chat_model", last).wait()
        assert is_alone
    found = json.dumps([drawn, [score.logprobs for score in scores]])
    (folder / f"{jax.process_count()}_led.json").write_text(found)
    if isinstance(made, leader.Leader):
        made.dismiss()


def score_other_rows(folder):
    """Each process is given a file of its own."""
    overrides = [*FLOATS, ("mesh.fsdp", "2")]
    tokens = str(folder / f"ids{jax.process_index()}.npy")
    commands.evaluate(
        str(folder / "release"), overrides, tokens=tokens, text=None, logits_out=None
    )


def refuse(folder):
    """Process 1 refuses its input while process 0 waits in a collective."""
    if jax.process_index() == 1:
        raise config_lib.InputError("process 1 finds no corpus.")
    together.all_true(True)


def die(folder):
    """Process 1 is killed while process 0 waits in a collective."""
    together.all_true(True)
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    together.all_true(True)


def raise_error(folder):
    """Process 0, whose service all others need, raises an error."""
    if jax.process_index() == 0:
        raise RuntimeError("a bug in process 0")
    together.all_true(True)


def lead_and_fail(folder):
    """A call of a led engine fails in process 0 alone, in a thread as a server's."""
    config, params, _ = quantized_loading.load_model(folder / "release", FLOATS)
    sizes = {"num_slots": 2, "capacity": 8}
    if not together.is_first():
        leader.follow(engine.Engine(params, config, **sizes))
        return
    led = leader.Leader(params, config, **sizes)
    threading.Thread(target=led.everywhere, args=(fail_in_first,)).start()
    threading.Event().wait()


def fail_in_first(_):
    if together.is_first():
        raise RuntimeError("a bug in process 0")


def run(scenario, folder):
    """Runs a scenario, the name of a function of this module."""
    # Where no connection breaks at once, the others miss a dead one after this time.
    heartbeat = 4 if scenario == "die" else 10
    with together.joined(group.find(), timeout=60, heartbeat=heartbeat):
        globals()[scenario](pathlib.Path(folder))
        sys.stdout.write("done\n")
