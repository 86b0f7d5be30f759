"""What every HTTP server of this project needs, whatever it serves. Imports no jax.

listening.py binds an address and ends without cutting answers off, guard.py stands
before all routes: key, limits, and clients that leave. errors.py has errors as clients
get them, connection.py drops clients that never finish a request, reach.py has the
flags of who reaches a server. serving/ is a model behind it, environments/service/ are
tasks.
"""
