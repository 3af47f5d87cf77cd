"""The node daemon: sessions of training ranks, the engine and its workers, and the command line.

Start reading at `daemon.py`; what the engine decides is in `run.py`, what the daemon decides in `sessions.py`.
"""
