"""Reinforcement learning: episodes, advantages and objectives.

rollouts.py runs many episodes on one engine. episodes.py is one episode, gateway.py its
messages and token ids. calls.py and event_loop.py call environments. completer.py is
what episodes ask of an engine, and pump.py lets them share one. advantages.py turns
rewards into advantages and weights, objectives.py are the losses, and publisher.py
gives the engine new weights. actors/ plays and trains at the same time.
"""
