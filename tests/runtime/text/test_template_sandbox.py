import tracemalloc

import pytest

from runtime.text.chat_template import ChatTemplate, ChatTemplateError
from runtime.text.template_sandbox import TemplateLimits

SMALL = TemplateLimits(characters=200_000, steps=20_000, seconds=60.0)
CHAT = [{"role": "user", "content": "hi"}]


def render(source: str, limits: TemplateLimits = SMALL) -> str:
    return ChatTemplate({"default": source}, {}, limits=limits).render(CHAT)


ESCAPES = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ messages|attr('__class__')|attr('__init__') }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['sys'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{% set n = namespace(__class__='x') %}{{ n }}",
    "{% set n = namespace() %}{% set n.__class__ = 'x' %}",
    "{{ dict.mro() }}",
    "{{ dict.__subclasses__() }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'content': 'x'}) }}",
    "{{ messages[0].pop('content') }}",
    "{{ lipsum.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{% extends '/etc/passwd' %}",
    "{{ open('/etc/passwd') }}",
    "{{ joined.__globals__ }}",
    "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "{{ messages|map(attribute='__class__')|list }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_does_not_get_out_of_the_sandbox(source):
    try:
        text = render(source)
    except ChatTemplateError:
        return
    # Jinja gives some of them the empty undefined value in place of an error.
    assert not any(word in text for word in ("class", "root:", "module", "function", "uid="))


def test_the_messages_are_not_changed():
    chat = [{"role": "user", "content": ["a"]}]
    template = ChatTemplate({"default": "{% set m = messages %}{{ m[0].content|length }}"}, {})
    assert template.render(chat) == "1"
    assert chat == [{"role": "user", "content": ["a"]}]


ENDLESS = [
    "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "{% for a in range(90000) %}{% for b in range(90000) %}{% continue %}{% endfor %}{% endfor %}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro w() %}{{ caller() }}{% endmacro %}{% for i in range(90000) %}"
    "{% for j in range(9) %}{% call w() %}x{% endcall %}{% endfor %}{% endfor %}",
    "{{ range(10000000000)|list }}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_does_not_run_for_ever(source):
    with pytest.raises(ChatTemplateError):
        render(source)


LARGE = [
    "{% for a in range(9000) %}{{ 'x' * 1000 }}{% endfor %}",
    "{{ 'x' * 10000000000 }}",
    "{{ 10000000000 * 'x' }}",
    "{{ [0] * 10000000000 }}",
    "{{ 10 ** 10000000000 }}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}"
    "{% set n.s = [n.s, n.s]|join %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}"
    "{% set n.s = ''.join([n.s, n.s]) %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}"
    "{% set n.s = '%s%s' % (n.s, n.s) %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}"
    "{% set n.s = '{0}{0}'.format(n.s) %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s=3) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
    "{{ n.s }}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
    "{{ n.s|tojson }}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = {1: n.s, 2: n.s} %}"
    "{% endfor %}{{ n.s|string }}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
    "{{ 'x' ~ n.s }}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
    "{{ '%s' % [n.s] }}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
    "{{ '{}'.format(n.s) }}",
    "{% set s = 'a' * 100000 %}{{ ('%(a)s' * 9999) % {'a': s} }}",
    "{% set s = 'a' * 100000 %}{{ ('{0}' * 9999).format(s) }}",
    "{% set s = 'a' * 100000 %}{{ s.replace('a', s) }}",
    "{% set s = 'a' * 100000 %}{{ s|replace('a', s) }}",
    "{% set s = 'a' * 1000 %}{{ s.join(range(900)|map('string')) }}",
    "{% set s = 'a' * 1000 %}{{ range(90000)|join(s) }}",
    "{{ 'x'.center(10000000000) }}",
    "{{ 'x'.ljust(width=10000000000) }}",
    "{{ 'x'.zfill(10000000000) }}",
    "{{ 'x\\ty'.expandtabs(10000000000) }}",
    "{{ 'x'|center(10000000000) }}",
    "{{ 'x\\ny'|indent(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10000000000, 1) }}",
    "{{ '%10000000000d'|format(1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10000000000) }}",
]


@pytest.mark.parametrize("source", LARGE)
def test_a_template_does_not_fill_the_memory(source):
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def test_every_rendering_has_the_whole_allowance():
    template = ChatTemplate(
        {"default": "{% for i in range(15000) %}{% endfor %}x"}, {}, limits=SMALL
    )
    assert [template.render(CHAT) for _ in range(3)] == ["x"] * 3


def test_the_time_is_looked_at():
    with pytest.raises(ChatTemplateError, match="of work"):
        render("{% for i in range(9) %}x{% endfor %}", TemplateLimits(seconds=0.0))


def test_formats_of_ordinary_width_are_left_alone():
    assert render("{{ '%5d|%-3s|%.2f' % (1, 'a', 0.5) }}") == "    1|a  |0.50"
    assert render("{{ '**bold 1234567** %s'|format('x') }}") == "**bold 1234567** x"
    assert render("{{ '{{}} {:>4}'.format('x') }}") == "{}    x"
