"""How bytes travel between daemon, engine, workers and clients: segments of shared memory, the slots inside
them, the connections that carry descriptors and segment handles, the messages, and where sockets live.
Needs numpy, msgpack and the standard library only; starts no process and opens no server by itself."""
