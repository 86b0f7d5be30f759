"""Reinforcement learning: episodes, advantages and objectives.

rollouts.py runs many episodes on one engine. episodes.py is one episode, gateway.py its
messages and token ids, pump.py and event_loop.py let episodes share the engine,
advantages.py turns rewards into advantages and weights, objectives.py are the losses,
and publisher.py gives the engine new weights.
"""
