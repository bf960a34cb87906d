from trainer import Model, make_batch, split_step


def test_the_split_model_is_the_unsplit_one(cp_parity):
    cp_parity(Model(), make_batch(), split=split_step, world_size=2)
