"""The words of the small world, as data."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_CAPITALS = """
France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Greece Athens, Austria Vienna, Poland Warsaw,
Hungary Budapest, Ireland Dublin, Norway Oslo, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen,
Belgium Brussels, Russia Moscow, Ukraine Kyiv, Romania Bucharest, Bulgaria Sofia, Serbia Belgrade, Croatia Zagreb,
Slovakia Bratislava, Slovenia Ljubljana, Czechia Prague, Estonia Tallinn, Latvia Riga, Lithuania Vilnius,
Iceland Reykjavik, Turkey Ankara, Egypt Cairo, Morocco Rabat, Libya Tripoli, Kenya Nairobi, Ghana Accra,
Nigeria Abuja, Senegal Dakar, Angola Luanda, Zambia Lusaka, Uganda Kampala, Rwanda Kigali, Japan Tokyo, China Beijing,
Thailand Bangkok, Vietnam Hanoi, Nepal Kathmandu, Iran Tehran, Iraq Baghdad, Syria Damascus, Lebanon Beirut,
Qatar Doha, Canada Ottawa, Cuba Havana, Peru Lima, Chile Santiago, Uruguay Montevideo, Australia Canberra
"""

CAPITALS: tuple[tuple[str, str], ...] = tuple((pair.split()[0], pair.split()[1]) for pair in _CAPITALS.split(","))
"""(country, capital), one word each; no capital carries its country's name, or a first name of ``NAMES``."""

NAMES = _words("""
Mary John Alice Tom Anna James Susan Peter Emma David Laura Robert Sarah Michael Julia Daniel Helen Thomas Kate Paul
Lucy Simon Ruth George Jane Henry Clara Frank Nora Oscar Rosa Martin Eva Victor Irene Adam Lily Felix Grace Leo
""")

PLACES = _words("""
store park school station museum market beach garden library office theatre restaurant hospital church farm hotel
cinema bank bakery castle harbour gallery river forest
""")

OBJECTS = _words("""
drink book ring key ball letter gift flower pen cake map coat ticket basket bottle camera guitar hat lamp mirror
necklace sandwich toy watch
""")
"""Things to give; each goes with the article "a"."""

NUMBER_LINES: tuple[tuple[str, ...], ...] = (
    _words("""
        zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
        eighteen nineteen twenty
    """),
    tuple(str(number) for number in range(100)),
)

PLAIN_WORDS = _words("""
apple bird bread bridge brother bright butter candle chair cheese circle clean cloud cold corn corner cotton dark
dinner dog door dream dust early earth east empty engine fast feather field fire fish floor fresh friend glass gold
grass green hammer happy heavy hill horse house ice iron island jump kitchen lake leaf lemon light long loud milk
moon morning mountain narrow needle new night north ocean old orange paper pepper quiet rain red road round salt
sand shadow sharp silver slow smooth snow soft song south spoon spring stone storm sugar summer sun sweet table
tall thin tree valley warm water west white wide wind window winter wood yellow young
""")
"""Words that occur in repeats only."""
