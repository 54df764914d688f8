"""Chat templates that are hostile or broken end with an error, in bounded time and memory; the next one renders."""

import os
import threading
import time

import pytest

from mionnx import TokenizerError
from mionnx.inputs.chat_renderer import ChatRenderer

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PLAIN = "{{ messages[0]['content'] }}"


@pytest.fixture(scope="module")
def renderer():
    return ChatRenderer()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 'a' * 10**10 }}", "memory"),
        ("{% set x = namespace(y='aa') %}{% for i in range(60) %}{% set x.y = x.y ~ x.y %}{% endfor %}", "memory"),
        ("{% for i in range(99999) %}{{ '%1000d' % i }}{% endfor %}", "longer than 4194304 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
        ("{% for i in range(10**9) %}{% endfor %}", "too big"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ raise_exception.__globals__.sys }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% if %}", "line 1"),
        ("{{ nothing.there }}", "'nothing' is undefined"),
        ("{{ raise_exception('roles must alternate') }}", "cannot be rendered: roles must alternate"),
    ],
)
def test_a_bad_template_is_refused(renderer, template, said):
    with pytest.raises(TokenizerError, match=said):
        renderer.render(template, CHAT)
    assert renderer.render(PLAIN, CHAT) == "hello"


def test_a_template_without_end_is_ended(renderer):
    impatient = ChatRenderer(seconds=0.5)
    assert impatient.render(PLAIN, CHAT) == "hello"
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    begin = time.perf_counter()
    with pytest.raises(TokenizerError, match=r"longer than 0\.5 seconds"):
        impatient.render(loops, CHAT)
    assert time.perf_counter() - begin < 5
    assert impatient.render(PLAIN, CHAT) == "hello"


def test_values_that_are_no_text(renderer):
    odd = {"messages": [{"role": "user", "content": "\ud800 \u2028 \x00 \U000f0000"}]}
    assert renderer.render(PLAIN, odd) == "\ud800 \u2028 \x00 \U000f0000"


def test_threads_share_it(renderer):
    found: dict[int, str] = {}

    def work(i):
        found[i] = renderer.render(PLAIN, {"messages": [{"content": str(i)}]})

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: str(i) for i in range(8)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_has_a_process_of_its_own(renderer):
    renderer.render(PLAIN, CHAT)
    before, (reader, writer) = renderer._owned, os.pipe()
    child = os.fork()
    if not child:
        found = renderer.render(PLAIN, CHAT) == "hello" and renderer._owned[1].pid != before[1].pid
        renderer._owned[1].kill()
        os.write(writer, b"yes" if found else b"no")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 3) == b"yes"
    assert renderer.render(PLAIN, CHAT) == "hello"
    assert renderer._owned == before
