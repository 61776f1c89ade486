"""A client's request from its submission to its only end, even if workers are lost; knows no protocol of clients."""
