"""The door: text to tokens and back, routing, and the life of every client request; knows no Ray."""
