"""A router before several servers of one model. Imports no jax.

app.py joins the parts. forward.py passes a request to a replica, and to another one
where that fails before the client has a byte; pool.py knows the replicas and chooses,
by session.py (which requests belong together), ring.py and balance.py (where they go);
health.py takes replicas out of service and back; everyone.py asks all of them at once;
local.py starts replicas on this machine.
"""
