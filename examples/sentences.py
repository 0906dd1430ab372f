"""Thirty sentences on six topics, and four questions that share hardly a word with their answers.

Data for the demo: an encoder that works puts a question beside the sentences of its topic.
"""

TOPICS: dict[str, tuple[str, ...]] = {
    "cooking": (
        "Let the dough rest under a damp cloth until it has doubled in size.",
        "Simmer the onions slowly in butter until they turn golden.",
        "A pinch of salt in the water makes the pasta taste of something.",
        "Sear the steak on both sides before it goes into the oven.",
        "Whisk the egg whites until they stand in stiff peaks.",
    ),
    "space": (
        "The probe sent back pictures of a moon covered in ice.",
        "Light from that galaxy left it before the Sun existed.",
        "The rocket's first stage landed upright on a ship.",
        "Astronauts on the station see sixteen sunrises a day.",
        "A rover drills into red rock to look for traces of water.",
    ),
    "money": (
        "The central bank raised interest rates by a quarter of a point.",
        "Her savings account pays less than inflation takes away.",
        "Shares fell sharply after the company warned about its profits.",
        "You can deduct the cost of a home office from your taxes.",
        "They fixed their mortgage for ten years.",
    ),
    "health": (
        "Wash the wound with clean water and cover it with a bandage.",
        "The doctor prescribed antibiotics for the infection.",
        "Half an hour of brisk walking a day lowers blood pressure.",
        "Most children are vaccinated against measles by the age of two.",
        "Lying awake at night may come from too much coffee in the afternoon.",
    ),
    "football": (
        "The goalkeeper saved a penalty in the last minute.",
        "Two late goals turned the match around.",
        "The striker was sent off after a second yellow card.",
        "Fans sang all the way from the station to the stadium.",
        "The coach changed the whole defence at half-time.",
    ),
    "computers": (
        "The server ran out of memory and the process was killed.",
        "Restart the router and wait until the light stops blinking.",
        "A race between two threads corrupted the cache.",
        "Back up your files before you install the update.",
        "The new release compiles twice as fast as the old one.",
    ),
}

SENTENCES: tuple[str, ...] = tuple(sentence for topic in TOPICS.values() for sentence in topic)

QUERIES: tuple[str, ...] = (
    "My program crashes because it needs too much RAM.",
    "What can I do when I cannot sleep?",
    "Is there life on Mars?",
    "How do I bake bread?",
)
