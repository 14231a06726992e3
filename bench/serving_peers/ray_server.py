"""Ray Serve, as it comes or as the environment says: POST /predict."""

import signal

import torch
from models import ROWS, asked, build
from ray import serve

MODEL, PORT = asked()


@serve.deployment(max_ongoing_requests=256)
class Net:
    def __init__(self, model):
        self.net = build(model)

    @serve.batch(max_batch_size=ROWS, batch_wait_timeout_s=0.0)
    async def run(self, rows):
        with torch.inference_mode():
            return self.net(torch.tensor(rows)).tolist()

    async def __call__(self, request):
        return {"output": await self.run((await request.json())["input"])}


if __name__ == "__main__":
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(Net.bind(MODEL), route_prefix="/predict")
    signal.pause()
