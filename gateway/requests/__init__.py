"""A client's request from admission to its one end, whatever becomes of workers; knows no protocol of clients."""
