from veloxquant.testing import MethodTests

DENSE = {"stage1": False, "topk": 10**6}


class TestDefault(MethodTests):
    method = "rocketkv"
    dense_config = DENSE
