"""Messages between processes. Nothing outside this package imports `zmq`."""
