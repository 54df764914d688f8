"""Attribution graphs: what features of transcoders, errors and tokens add to one another and to the logits."""
