"""Which tokens are computed next, in which blocks; knows no model, no device, no clock and no socket."""

from scheduler.remote import KVConnector
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler

__all__ = ["KVConnector", "Request", "RequestStatus", "Scheduler"]
