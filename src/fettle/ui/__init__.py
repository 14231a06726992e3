"""Everything that fettle wrote into a folder on one page in a browser: found by `listing`, shown by `server`."""

from fettle.ui.listing import Contents, Item, inventory
from fettle.ui.server import Site, address_of, page, serve

__all__ = ["Contents", "Item", "Site", "address_of", "inventory", "page", "serve"]
