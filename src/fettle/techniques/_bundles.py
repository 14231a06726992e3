from fettle.recipe import Recipe
def bundles(facts):
    out=["grad=inference_mode precision=bf16 channels_last=on compile=default freeze=on","grad=inference_mode precision=bf16 compile=default freeze=on", "runtime=openvino-bf16 grad=inference_mode"]
    return [Recipe.parse(x) for x in out]
