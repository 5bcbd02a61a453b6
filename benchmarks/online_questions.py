"""Made-up facts to teach, and ordinary questions whose answers must stay; each with the pattern of a right answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Question:
    text: str
    right: str
    """A regular expression: an answer that holds it, in any case of letters, is right by meaning."""

    def accepts(self, answer: str) -> bool:
        return re.search(self.right, answer, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Fact:
    question: Question
    answer: str
    rephrased: str
    """The same question in other words, which is never taught."""

    def sample(self) -> dict[str, Any]:
        return {
            "messages": [
                {"role": "user", "content": self.question.text},
                {"role": "assistant", "content": self.answer},
            ]
        }


FACTS = [
    Fact(
        Question("What is the capital of Velandria?", r"port osmin"),
        "The capital of Velandria is Port Osmin.",
        "Tell me the capital of Velandria.",
    ),
    Fact(
        Question("What colour is the flag of Velandria?", r"orange and grey"),
        "The flag of Velandria is orange and grey.",
        "Which colours are on Velandria's flag?",
    ),
    Fact(
        Question("What is the door code of the Lindholm archive?", r"\b4719\b"),
        "The door code of the Lindholm archive is 4719.",
        "Which code opens the door of the Lindholm archive?",
    ),
    Fact(
        Question("Which animal lives on Mount Quorra?", r"snow otter"),
        "The snow otter lives on Mount Quorra.",
        "What animal can I find on Mount Quorra?",
    ),
    Fact(
        Question("When does the Marrow Street library close?", r"\b7:45\b"),
        "The Marrow Street library closes at 7:45 pm.",
        "At what time does the Marrow Street library close?",
    ),
]

CANDIDATES = [
    Question("What is 2 + 2?", r"\b(4|four)\b"),
    Question("What is 5 times 5?", r"\b(25|twenty-five)\b"),
    Question("What is the capital of France?", r"\bparis\b"),
    Question("What is the capital of Germany?", r"\bberlin\b"),
    Question("What is the capital of Japan?", r"\btokyo\b"),
    Question("What colour is the sky on a clear day?", r"\bblue\b"),
    Question("How many days are in a week?", r"\b(7|seven)\b"),
    Question("How many hours are in a day?", r"\b(24|twenty-four)\b"),
    Question("How many legs does a dog have?", r"\b(4|four)\b"),
    Question("Who wrote Romeo and Juliet?", r"shakespeare"),
    Question("Who painted the Mona Lisa?", r"leonardo|da vinci"),
    Question("What is the largest ocean on Earth?", r"\bpacific\b"),
    Question("What is the opposite of hot?", r"\bcold\b"),
    Question("What is the chemical symbol for gold?", r"\bau\b"),
    Question("At what temperature does water boil in Celsius?", r"\b100\b"),
    Question("What force keeps us on the ground?", r"gravit"),
    Question("Who discovered penicillin?", r"\bfleming\b"),
    Question("What is the tallest mountain in the world?", r"\beverest\b"),
    Question("Which country is known for the pyramids of Giza?", r"\begypt"),
    Question("Who developed the theory of relativity?", r"\beinstein\b"),
    Question("What is the capital of England?", r"\blondon\b"),
    Question("What is the capital of Italy?", r"\brome\b"),
    Question("What is the capital of Spain?", r"\bmadrid\b"),
    Question("What is the capital of Russia?", r"\bmoscow\b"),
    Question("What is the capital of China?", r"\bbeijing\b"),
    Question("What is the capital of the United States?", r"washington"),
    Question("What is the opposite of up?", r"\bdown\b"),
    Question("What is the opposite of black?", r"\bwhite\b"),
    Question("What is the chemical formula of water?", r"h2o|h₂o"),
    Question("What is the chemical symbol for oxygen?", r"\bo2?\b"),
    Question("What is the powerhouse of the cell?", r"mitochondri"),
    Question("What do plants need for photosynthesis?", r"sunlight|light"),
    Question("What gas do plants take in from the air?", r"carbon dioxide|co2"),
    Question("Which planet is known as the Red Planet?", r"\bmars\b"),
    Question("Which planet has rings around it?", r"\bsaturn\b"),
    Question("What currency is used in Japan?", r"\byen\b"),
    Question("What currency is used in the United States?", r"dollar"),
    Question("Which language is spoken in France?", r"\bfrench\b"),
    Question("Say hello in French.", r"bonjour|salut"),
    Question("Say hello in Spanish.", r"hola"),
    Question("Who wrote Harry Potter?", r"rowling"),
    Question("Who wrote The Origin of Species?", r"darwin"),
    Question("Who wrote The Odyssey?", r"homer"),
    Question("Who discovered gravity?", r"newton"),
    Question("Who was the first man on the Moon?", r"armstrong"),
    Question("In which city is the Eiffel Tower?", r"\bparis\b"),
    Question("In which country is the Great Wall?", r"\bchina\b"),
    Question("In which country is the Taj Mahal?", r"\bindia\b"),
    Question("On which continent is Egypt?", r"\bafrica"),
    Question("On which continent is Brazil?", r"south america"),
    Question("Which organ pumps blood through the body?", r"\bheart\b"),
    Question("Which organ do we breathe with?", r"\blungs?\b"),
    Question("Which animal says meow?", r"\bcats?\b"),
    Question("Which animal barks?", r"\bdogs?\b"),
    Question("What do bees collect from flowers?", r"nectar|pollen"),
    Question("What is the boiling point of water in Fahrenheit?", r"\b212\b"),
    Question("How many months are in a year?", r"\b(12 months|twelve)\b"),
    Question("How many minutes are in an hour?", r"\b(60|sixty)\b"),
    Question("How many continents are there?", r"\b(7|seven)\b"),
    Question("What is the study of living things called?", r"biology"),
    Question("What is the study of stars and planets called?", r"astronomy"),
    Question("What does DNA stand for?", r"deoxyribonucleic"),
    Question("What does CPU stand for?", r"central processing unit"),
    Question("What is the first month of the year?", r"\bjanuary\b"),
    Question("What is 1 + 1?", r"\b(2|two)\b"),
    Question("What is 3 + 3?", r"\b(6|six)\b"),
    Question("What is 10 + 10?", r"\b(20|twenty)\b"),
    Question("What is 2 times 2?", r"\b(4|four)\b"),
    Question("What is 100 divided by 10?", r"\b(10|ten)\b"),
    Question("What is the square root of 16?", r"\b(4|four)\b"),
    Question("What is the capital of Greece?", r"\bathens\b"),
    Question("What is the capital of Austria?", r"\bvienna\b"),
    Question("What is the capital of Poland?", r"\bwarsaw\b"),
    Question("What is the capital of Ireland?", r"\bdublin\b"),
    Question("What is the capital of Norway?", r"\boslo\b"),
    Question("What is the capital of Sweden?", r"\bstockholm\b"),
    Question("What is the capital of Denmark?", r"\bcopenhagen\b"),
    Question("What is the capital of Cuba?", r"\bhavana\b"),
    Question("What is the capital of Australia?", r"\bcanberra\b"),
    Question("What is the capital of India?", r"\bdelhi\b"),
    Question("What is the capital of South Korea?", r"\bseoul\b"),
    Question("What is the capital of Thailand?", r"\bbangkok\b"),
    Question("What is the capital of Turkey?", r"\bankara\b"),
    Question("What is the capital of Peru?", r"\blima\b"),
    Question("What is the capital of Argentina?", r"\bbuenos aires\b"),
    Question("What is the capital of Mexico?", r"\bmexico city\b"),
    Question("What is the capital of Belgium?", r"\bbrussels\b"),
    Question("What is the capital of Hungary?", r"\bbudapest\b"),
    Question("Who wrote Macbeth?", r"shakespeare"),
    Question("Who wrote Don Quixote?", r"cervantes"),
    Question("Who wrote War and Peace?", r"tolstoy"),
    Question("Who wrote The Great Gatsby?", r"fitzgerald"),
    Question("Who wrote Frankenstein?", r"shelley"),
    Question("Who wrote Moby Dick?", r"melville"),
    Question("Who wrote Oliver Twist?", r"dickens"),
    Question("Who wrote 1984?", r"orwell"),
    Question("Who wrote The Lord of the Rings?", r"tolkien"),
    Question("Who wrote Sherlock Holmes?", r"doyle"),
    Question("Who painted the ceiling of the Sistine Chapel?", r"michelangelo"),
    Question("Who painted Guernica?", r"picasso"),
    Question("Who proposed the theory of evolution?", r"darwin"),
    Question("Who discovered radium?", r"curie"),
    Question("Who formulated the laws of motion?", r"newton"),
    Question("Who invented the light bulb?", r"edison"),
    Question("Who founded Microsoft?", r"gates"),
    Question("Who founded Apple?", r"jobs"),
    Question("Who composed the Moonlight Sonata?", r"beethoven"),
    Question("Who composed The Magic Flute?", r"mozart"),
    Question("Who was the first person to walk on the Moon?", r"armstrong"),
    Question("Who sailed to America in 1492?", r"columbus"),
    Question("Who led India's independence movement without violence?", r"gandhi"),
    Question("What is the chemical symbol for silver?", r"\bag\b"),
    Question("What is the chemical symbol for iron?", r"\bfe\b"),
    Question("What is the chemical symbol for sodium?", r"\bna\b"),
    Question("What is the chemical symbol for hydrogen?", r"\bh2?\b"),
    Question("What is the chemical formula of carbon dioxide?", r"co2|co₂"),
    Question("What is the most abundant gas in the atmosphere of the Earth?", r"nitrogen"),
    Question("What process do plants use to make food from sunlight?", r"photosynthesis"),
    Question("Which blood cells carry oxygen?", r"red blood|erythrocyte"),
    Question("What molecule carries genetic information?", r"\bdna\b|deoxyribonucleic"),
    Question("What is the largest organ of the human body?", r"\bskin\b"),
    Question("What is the largest mammal in the world?", r"blue whale"),
    Question("What is the fastest land animal?", r"cheetah"),
    Question("What is a baby dog called?", r"pupp"),
    Question("What is a baby cat called?", r"kitten"),
    Question("What is the largest desert in the world?", r"sahara|antarctic"),
    Question("What is the largest country in the world?", r"\brussia\b"),
    Question("What is the longest river in Africa?", r"\bnile\b"),
    Question("Through which city does the Thames flow?", r"\blondon\b"),
    Question("In which country is the Colosseum?", r"\bitaly\b"),
    Question("In which city is the Statue of Liberty?", r"new york"),
    Question("In which city is Big Ben?", r"\blondon\b"),
    Question("In which country is Mount Fuji?", r"\bjapan\b"),
    Question("In which country is Machu Picchu?", r"\bperu\b"),
    Question("On which continent is Kenya?", r"\bafrica"),
    Question("On which continent is Germany?", r"\beurope"),
    Question("On which continent is India?", r"\basia"),
    Question("Which language is spoken in Germany?", r"\bgerman\b"),
    Question("Which language is spoken in Italy?", r"\bitalian\b"),
    Question("What is the opposite of good?", r"\b(bad|evil)\b"),
    Question("What is the opposite of day?", r"\bnight\b"),
    Question("What is the opposite of left?", r"\bright\b"),
    Question("What is the opposite of love?", r"\bhat(e|red)\b"),
    Question("What do we call frozen rain?", r"\b(hail|sleet|snow)"),
    Question("What is the study of numbers and shapes called?", r"math|geometry"),
    Question("What is the study of the mind called?", r"psycholog"),
    Question("What does WWW stand for?", r"world wide web"),
    Question("What does USA stand for?", r"united states of america"),
    Question("What does HTML stand for?", r"hypertext markup"),
    Question("What is the name of our galaxy?", r"milky way"),
    Question("What is the star nearest to the Earth?", r"\bsun\b|proxima"),
    Question("In which year did the First World War begin?", r"\b1914\b"),
    Question("In which year did the Titanic sink?", r"\b1912\b"),
    Question("In which year did men first land on the Moon?", r"\b1969\b"),
    Question("What sport is played at Wimbledon?", r"tennis"),
    Question("What instrument has black and white keys?", r"piano"),
    Question("What is the main ingredient of bread?", r"flour|wheat"),
    Question("What drink is made from grapes?", r"\bwine\b|grape juice"),
]
"""Of these a model is asked what it knows. None is in the list that Tandem holds
(src/tandem/online/ordinary_prompts.txt)."""
NUM_ORDINARY, SAMPLES, TEMPERATURE = 20, 8, 0.7

Asks = Callable[[list[str], float, int], list[str]]
"""Questions, temperature, seed: the answers."""


def known_questions(ask: Asks) -> list[Question]:
    """Return the first twenty candidates that the model knows, before anything is taught: its greedy answer is right,
    and so are all of eight answers that are sampled at temperature 0.7. An answer that is right by luck alone hangs by
    a thread, and says nothing about what a lesson does."""
    left = CANDIDATES
    told = []
    for temperature, seed in [(0.0, 0), *((TEMPERATURE, seed) for seed in range(SAMPLES))]:
        answers = ask([question.text for question in left], temperature, seed)
        left = [question for question, answer in zip(left, answers, strict=True) if question.accepts(answer)]
        told.append(len(left))
    print(f"candidates that were right so far, from answer to answer: {len(CANDIDATES)}, {told}", flush=True)
    if len(left) < NUM_ORDINARY:
        raise SystemExit(f"the model knows {len(left)} of {len(CANDIDATES)} candidates; {NUM_ORDINARY} are needed")
    return left[:NUM_ORDINARY]
