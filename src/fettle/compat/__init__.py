"""Other people's formats and servers: TorchServe's archives as packages, packages as Ray Serve applications."""
