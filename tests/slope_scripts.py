"""Scripts of micro steps on a model of two slopes, as the tests of DDP and of FSDP2 play them."""


def m(weight, a, b=0):
    """A forward and backward of these slopes; without a weight a plain one."""
    return weight, a, b


def run_micro_step(opt, net, weight, a, b):
    loss = net(a, b)
    if weight is None:
        loss.backward()
    else:
        opt.backward(loss, weight=weight)


def run_script(opt, net, script):
    """Runs micro steps (a list is several backwards of one), and calls methods by their names."""
    for event in script:
        if isinstance(event, str):
            getattr(opt, event)()
            continue
        for one in event if isinstance(event, list) else [event]:
            run_micro_step(opt, net, *one)
        opt.step()
