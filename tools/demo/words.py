"""Names, goods and places the demo corpus is made of, and how new ones are spelled."""

from __future__ import annotations

import hashlib
from random import Random


def _words(text: str) -> list[str]:
    return text.split()


FIRST = _words("""
Ana Marco Lucia Tomas Ines Jonas Mia Oscar Nadia Felix Clara Hugo Elena Victor Sofia Daniel Laura
Peter Maria Ivan Julia Simon Nora Adam Eva Leo Rosa Max Alice Ben Chloe David Emma Frank Grace
Henry Irene Jack Karen Liam Megan Noah Olivia Paul Quinn Rachel Sam Tina Umar Vera Will Yara Zoe
Aisha Omar Fatima Yusuf Leila Hassan Priya Arjun Ravi Anita Kenji Yuki Hana Mei Wei Linh Minh
Chidi Amara Kwame Zuri Thabo Diego Carmen Pablo Isabel Mateo Rafael Beatriz Joao Giulia Luca
Chiara Pierre Camille Antoine Margot Hans Greta Lars Ingrid Sven Astrid Olga Dmitri Katya Pavel
Zofia Agnes Milan Petra José Zoë René Søren Chloé André Mónica Jürgen Anne Mary John James Robert
Linda Susan Thomas Sarah Chris Nancy Kevin Brian Dorothy Edward Ruth Sharon Gary Nicole Eric
Stephen Jonathan Brenda Pamela Samuel Patrick Janet Carolyn Walter Arthur Joan Judith Roger Terry
Sean Billy Bruce Willie Dylan Alan Ralph Roy Louis Philip Johnny Bobby Ethan Aaron Jose Kyle
""")

LAST = _words("""
Silva Rossi Novak Garcia Muller Schmidt Dubois Laurent Kowalski Nowak Horvat Petrov Ivanova
Andersson Nilsson Hansen Larsen Virtanen Jansen Visser Bakker Peeters Costa Santos Pereira Lopez
Martin Bernard Moreau Weber Fischer Wagner Becker Hoffmann Keller Ricci Conti Greco Marino Smith
Jones Taylor Brown Wilson Evans Thomas Roberts Walker Wright Hughes Green Hall Wood Clarke Baker
Carter Mitchell Turner Parker Collins Murphy Kelly Byrne Ryan Campbell Stewart Fraser Murray Khan
Ahmed Hussain Patel Sharma Gupta Singh Kumar Tanaka Sato Suzuki Kim Park Lee Chen Wang Zhang Nguyen
Tran Okafor Mensah Diallo Ndiaye Abebe Haddad Nasser Cohen Levi Katz Demir Yilmaz Popescu Ionescu
Kovacs Nagy Svoboda Dvorak Fernandez Torres Ramirez Flores Morales Castillo O'Brien O'Neill
D'Angelo O'Connor Müller Núñez Peña Gómez Lindström Sørensen Lefèvre Johnson Williams Davis Miller
Anderson Moore Jackson White Harris Thompson Robinson Lewis Young King Hill Scott Adams Nelson
Rivera Reed Cook Morgan Bell Cooper Ward Gray Price Bennett Wood Barnes Ross Henderson Coleman
Perry Powell Long Patterson Washington Butler Simmons Foster Gonzales Bryant Alexander Griffin
""")

# Parts for names nobody on the lists has, so that copying is learned and not a list of names.
_ONSETS = _words("""
b br c ch cl d dr f fl g gr h j k kr l m n p pr qu r s sh sk st t th tr v w y z x bl vl zh kh
""")
_VOWELS = _words("a e i o u a e i o ai ea ie ou ee y au oo ia")
_CODAS = [
    "",
    "",
    "",
    *_words("n r l s t m d k nd rn lt sk ck ss th x v z ng tch tt ll rd gh mp ns nt rg"),
]
_TAILS = _words("""
ford wick ley ton berg mann sen ski ova escu idis quist stad worth more field ham by shaw dale
well man ner ier ez es ini ato etti aux ard ell ie ina ette us on ia o
""")

MATERIALS = _words("""
oak pine walnut bamboo linen cotton wool silk leather velvet ceramic glass copper brass steel
marble cork wicker paper wooden bronze clay stone denim felt silver plastic rubber iron
""")
ADJECTIVES = _words("""
blue red green black white grey yellow orange purple pink navy teal small large round square
folding vintage handmade organic striped painted scented mini double portable antique long short
tall soft heavy light thick cordless electric
""")
NOUNS = _words("""
shelf mug lamp chair table apron blanket candle basket vase rug cushion bowl plate teapot kettle
tray mirror frame clock stool desk bench cabinet curtain towel pillow scarf bag backpack wallet
belt hat notebook pen poster planter jar bottle knife pan pot spoon board rack hook box drawer
toaster blender speaker charger cable headset keyboard monitor printer bicycle helmet tent bracelet
necklace ring earring jacket shirt sweater dress coat glove sock boot sandal ladder hammer drill
brush bucket hose umbrella guitar drum puzzle doll kite ball cake pie loaf soap lotion perfume
radiator heater fan bulb sofa mattress couch phone laptop tablet camera watch wreath satchel oven
grill fridge freezer iron crib stroller bouquet subscription ticket voucher costume uniform saddle
surfboard skateboard racket trophy globe telescope microscope compass tripod lens keychain doormat
""")
_IRREGULAR = {"shelf": "shelves", "knife": "knives", "loaf": "loaves", "glass": "glasses"}

CITIES = _words("""
Porto Lisbon Madrid Seville Bilbao Paris Lyon Nantes Lille Berlin Hamburg Munich Cologne Vienna
Graz Zurich Geneva Milan Turin Naples Bologna Rome Prague Brno Warsaw Gdansk Krakow Budapest
Zagreb Athens Sofia Bucharest Oslo Bergen Stockholm Malmo Helsinki Tampere Copenhagen Aarhus Dublin
Cork Galway London Leeds Bristol York Glasgow Edinburgh Cardiff Belfast Boston Chicago Denver
Austin Portland Seattle Toronto Montreal Lagos Accra Nairobi Cairo Tunis Mumbai Pune Delhi Osaka
Kyoto Seoul Hanoi Lima Bogota Quito Santiago Rotterdam Utrecht Ghent Antwerp Manchester Liverpool
Houston Dallas Phoenix Atlanta Miami Melbourne Sydney Perth Auckland Vancouver Oxford Cambridge
""")

NUMBER_WORDS = _words("one two three four five six seven eight nine ten eleven twelve")


def bucket(text: str, buckets: int) -> int:
    """A stable bucket for a text: Python's own hash changes from run to run."""
    digest = hashlib.blake2b(text.casefold().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % buckets


def _mutated(rng: Random, word: str) -> str:
    """A listed name with one letter changed or put in."""
    at = rng.randrange(1, len(word))
    return word[:at] + rng.choice("abcdefghijklmnoprstuvwyz") + word[at + rng.randint(0, 1) :]


def spelled(rng: Random, *, tail: bool) -> str:
    """A pronounceable word that is on no list."""
    if rng.random() < 0.2:
        return _mutated(rng, rng.choice(LAST if tail else FIRST))
    word = rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
    if rng.random() < 0.4:
        word += rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
    if tail or len(word) < 4:
        word += rng.choice(_TAILS)
    return word.capitalize()


def is_novel(word: str) -> bool:
    """Tells whether a spelled word is kept for the held-out side."""
    return bucket("word:" + word, 5) == 0


def spelled_for(rng: Random, *, novel: bool, tail: bool) -> str:
    """A spelled word from one side of the split."""
    while True:
        word = spelled(rng, tail=tail)
        if is_novel(word) == novel:
            return word


def _pick_name(rng: Random, listed: list[str], *, novel: bool, tail: bool) -> str:
    share = 0.5 if novel else 0.4
    if rng.random() < share:
        return spelled_for(rng, novel=novel, tail=tail)
    return rng.choice(listed)


def person(rng: Random, *, novel: bool) -> str:
    """A first name, usually with one surname and now and then with two or a hyphen."""
    first = _pick_name(rng, FIRST, novel=novel, tail=False)
    roll = rng.random()
    if roll < 0.25:
        return first
    last = _pick_name(rng, LAST, novel=novel, tail=True)
    if roll < 0.29:
        last += "-" + _pick_name(rng, LAST, novel=novel, tail=True)
    elif roll < 0.32:
        last += " " + _pick_name(rng, LAST, novel=novel, tail=True)
    elif roll < 0.34:
        first += " " + rng.choice("ABCDEFGHJKLMNPRSTW") + "."
    return f"{first} {last}"


def plural(noun: str) -> str:
    """The plural of a noun on the list."""
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun + "s"


def _described(rng: Random, noun: str) -> str:
    roll = rng.random()
    if roll < 0.18:
        return noun
    if roll < 0.46:
        return f"{rng.choice(MATERIALS)} {noun}"
    if roll < 0.74:
        return f"{rng.choice(ADJECTIVES)} {noun}"
    return f"{rng.choice(ADJECTIVES)} {rng.choice(MATERIALS)} {noun}"


def product(rng: Random, *, novel: bool, many: bool) -> str:
    """Goods as a customer names them; some carry a made-up brand."""
    noun = rng.choice(NOUNS)
    if rng.random() < 0.07:
        noun = spelled_for(rng, novel=novel, tail=False).lower()
    noun = plural(noun) if many else noun
    if rng.random() < 0.12:
        return f"{spelled_for(rng, novel=novel, tail=rng.random() < 0.5)} {noun}"
    while True:
        text = _described(rng, noun)
        # A description of several words belongs to one side of the split.
        if " " not in text or (bucket("goods:" + text, 5) == 0) == novel:
            return text


def city(rng: Random, *, novel: bool) -> str:
    """A town, sometimes one that does not exist."""
    if rng.random() < (0.3 if novel else 0.15):
        return spelled_for(rng, novel=novel, tail=True)
    return rng.choice(CITIES)


def order_number(rng: Random) -> str:
    """An order number in one of the shapes shops use."""
    digits = "".join(rng.choice("0123456789") for _ in range(rng.choice((4, 5, 5, 5, 6))))
    roll = rng.random()
    if roll < 0.75:
        return digits
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.choice((1, 2))))
    return f"{letters}-{digits}" if roll < 0.88 else f"{letters}{digits}"
