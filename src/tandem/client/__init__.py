"""Use a control plane from Python (layer 3): `from tandem.client import Tandem`, or `AsyncTandem`.

operations.py: what may be asked, once for both clients; blocking.py and waiting.py: the two. requests.py: what is sent,
and what an answer means. place.py: which server, and with which key. pull.py: a mirror of a run as a directory.
index.py: the packages of environments. openid.py: a person signs in.
"""

from tandem.client.blocking import RemoteRun, Tandem
from tandem.client.index import PackageIndex, VerifiedPackage
from tandem.client.place import Place, find_place, save_place
from tandem.client.waiting import AsyncRemoteRun, AsyncTandem

__all__ = [
    "AsyncRemoteRun",
    "AsyncTandem",
    "PackageIndex",
    "Place",
    "RemoteRun",
    "Tandem",
    "VerifiedPackage",
    "find_place",
    "save_place",
]
