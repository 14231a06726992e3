"""mosec: POST /inference."""

import sys

import torch
from models import ROWS, asked, build
from mosec import Server, Worker

MODEL, PORT = asked() if len(sys.argv) == 3 else ("", 0)


class Net(Worker):
    def __init__(self):
        super().__init__()
        import os

        self.net = build(os.environ["PEER_MODEL"])

    def forward(self, data):
        with torch.inference_mode():
            found = self.net(torch.tensor([item["input"] for item in data]))
        return [{"output": row.tolist()} for row in found]


if __name__ == "__main__":
    import os

    os.environ["PEER_MODEL"] = MODEL  # its workers are spawned, with arguments of their own
    sys.argv = [sys.argv[0], "--port", str(PORT), "--address", "127.0.0.1"]
    server = Server()
    server.append_worker(Net, num=1, max_batch_size=ROWS, max_wait_time=1)
    server.run()
