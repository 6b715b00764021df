"""Messages between processes of one machine: frames on a socket (`connection.py`), plain data, shared memory."""
