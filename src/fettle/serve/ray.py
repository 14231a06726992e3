"""Where the Ray applications that earlier versions exported look for `application`; it lives in `fettle.compat.ray`."""

import importlib

application = importlib.import_module("fettle.compat.ray").application
