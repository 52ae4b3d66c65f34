"""First words of user turns, written for this project, so that generated text covers all workloads.

A small target that is left to invent the whole user turn asks mostly for essays. Half of the turns
therefore begin with a phrase from here, which the target continues in its own words.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

DEFAULT_SYSTEM_SHARE = 0.9
COMPLETION_SHARE, FUNCTION_SHARE = 0.45, 0.35  # of code: a signature given, a task in words
PEOPLE_SHARE = 0.6  # of mathematics: stories about people
TOPIC_SHARE = 0.5  # of chat: a task with a subject
WHOLE_SHARE = 0.5  # of tasks with a subject: not cut short

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful assistant that answers in as few words as the question needs.",
    "You are an expert programmer. Answer with code and a short explanation.",
    "You are a patient mathematics teacher. Solve problems step by step.",
    "You are a thoughtful writer who helps people put things into words.",
    "You summarise texts faithfully and briefly.",
)

_FUNCTION_TASKS = (
    "checks whether a word is a palindrome",
    "returns the n-th Fibonacci number",
    "counts the vowels in a string",
    "reverses the words of a sentence",
    "merges two sorted lists",
    "finds the largest element of a list",
    "removes duplicates from a list while keeping the order",
    "computes the factorial of a number",
    "checks if a number is prime",
    "flattens a nested list",
    "converts Celsius to Fahrenheit",
    "finds the longest common prefix of a list of strings",
    "prints the multiplication table of a number",
    "rotates a list by k places",
    "groups words that are anagrams of each other",
    "returns the running mean of a list of numbers",
    "parses a date in the form YYYY-MM-DD",
    "counts how often each character occurs",
    "finds all pairs of numbers that add up to a target",
    "checks whether brackets are balanced",
    "transposes a matrix given as a list of lists",
    "sorts a list of dictionaries by a key",
    "returns the second smallest number in a list",
    "converts a Roman numeral to an integer",
    "finds the intersection of two lists",
    "encodes a string with run-length encoding",
    "capitalises the first letter of every word",
    "computes the distance between two points",
    "binary searches a sorted list",
    "splits a list into chunks of a given size",
    "returns all subsets of a set",
    "checks whether two strings differ by one letter",
    "sums the digits of a number",
    "finds the mode of a list",
    "multiplies two matrices",
    "validates an email address",
    "reads a CSV file and returns the rows as dictionaries",
)

_SIGNATURES = (
    'def is_sorted(numbers: list[int]) -> bool:\n    """',
    'def count_words(text: str) -> dict[str, int]:\n    """',
    'def longest_run(values: list[int]) -> int:\n    """',
    'def remove_spaces(text: str) -> str:\n    """',
    'def second_largest(numbers: list[int]) -> int:\n    """',
    'def common_elements(first: list[int], second: list[int]) -> list[int]:\n    """',
    'def to_binary(number: int) -> str:\n    """',
    'def even_numbers(limit: int) -> list[int]:\n    """',
    'def caesar_cipher(text: str, shift: int) -> str:\n    """',
    'def sum_of_squares(n: int) -> int:\n    """',
    'def starts_with_vowel(word: str) -> bool:\n    """',
    'def median(values: list[float]) -> float:\n    """',
    'def interleave(first: str, second: str) -> str:\n    """',
    'def max_product(numbers: list[int]) -> int:\n    """',
    'def digits(number: int) -> list[int]:\n    """',
    'def widest_gap(readings: list[float]) -> float:\n    """',
    'from typing import List\n\n\ndef filter_short(words: List[str]) -> List[str]:\n    """',
    'from typing import List\n\n\ndef prefix_sums(numbers: List[int]) -> List[int]:\n    """',
    'import math\n\n\ndef area_of_polygon(sides: int, length: float) -> float:\n    """',
    'def find_missing(numbers: list[int]) -> int:\n    """',
    'def alternate_case(text: str) -> str:\n    """',
    'def strictly_increasing(values: list[int]) -> bool:\n    """',
    'def decode_shift(s: str):\n    """',
    'def unique_digits(x):\n    """',
)

_CODE_ASKS = (
    "Write a Python function that ",
    "Write a function in Python which ",
    "Implement a function that ",
    "I need a short Python program that ",
    "Can you write Python code that ",
    "Show me a function that ",
    "Write a JavaScript function that ",
    "Create a Python function with tests that ",
)

_CODE_OTHER = (
    "Write a SQL query that ",
    "Explain what this code does:\n\n",
    "Fix the bug in this function:\n\ndef ",
    "Write a class in Python that represents a ",
    "Write a bash command that ",
    "What is the difference between a list and a ",
    "How do I read a file in ",
    "Write an HTML page with ",
    "Complete the following function:\n\ndef ",
    "Refactor this code:\n\n",
    "What does the error ",
    "How can I use recursion to ",
    "Write a regular expression that matches ",
)

_COMPLETION_ASKS = (
    "Complete the code I provided.\n\n",
    "Complete this function:\n\n",
    "Please finish the following Python code.\n\n",
    "Complete the body of this function.\n\n```python\n",
)

_NAMES = (
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Elena",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jamal",
    "Kira",
    "Leo",
    "Mara",
    "Noah",
    "Olga",
    "Pedro",
    "Quinn",
    "Rosa",
    "Samir",
    "Tina",
    "Umar",
    "Vera",
    "Walter",
    "Yuki",
)

_MATH_PLOTS = (
    " has {a} apples and buys {b} more",
    " reads {a} pages a day",
    " earns ${a} an hour and works {b} hours",
    " bakes {a} cookies and gives away {b}",
    " drives at {a} miles per hour for {b} hours",
    " has {a} marbles, which is {b} more than",
    " buys {b} notebooks that cost ${a} each",
    " saves ${a} every week",
    " plants {b} rows of {a} trees",
    " is {a} years old. In {b} years",
    " walks {b} miles every morning and",
    " fills {b} boxes with {a} books each",
    " collects {a} stamps in the first month and twice as many",
    " sells {a} tickets at ${b} each",
    " has a garden that is {a} feet long and {b} feet wide",
    " needs {a} grams of flour for one cake",
    " spends a third of ${a} on",
    " runs {b} laps and each lap is {a} meters",
)

_MATH_OTHER = (
    "A farmer has {a} sheep and",
    "A train travels {a} miles in {b} hours",
    "A store sells pens for ${b} each.",
    "There are {a} students in a class.",
    "A rectangle has a length of {a} and a width of {b}.",
    "Solve the equation {b}x + {a} =",
    "What is {a} percent of",
    "Calculate the area of a circle with radius {b}",
    "The sum of two numbers is {a}.",
    "If 3 workers build a wall in {b} days,",
    "A jacket costs ${a} and is",
    "In a school of {a} students,",
    "A recipe for {b} people needs",
    "The ratio of boys to girls is",
    "Find the average of {a}, {b} and",
    "A bakery makes {a} loaves of bread a day.",
)

_TOPICS = (
    "a small town by the sea",
    "the value of patience",
    "learning a new language",
    "climate change",
    "a dragon who is afraid of fire",
    "healthy breakfasts",
    "the first day at a new job",
    "space travel",
    "friendship",
    "how bees make honey",
    "the history of bread",
    "public libraries",
    "renewable energy",
    "a lost letter",
    "saving money",
    "time management",
    "a robot that learns to paint",
    "good sleep",
    "the ocean at night",
    "remote work",
    "growing tomatoes",
    "ancient Rome",
    "jazz music",
    "machine learning",
    "a detective in the rain",
    "city parks",
    "volcanoes",
    "a birthday party that goes wrong",
    "chess",
)

_CHAT_ASKS = (
    "Write a short story about ",
    "Write a poem about ",
    "Write an email to my boss about ",
    "Give me three tips on ",
    "Explain the main ideas behind ",
    "What are the advantages and disadvantages of ",
    "Help me plan a talk on ",
    "Write a blog post about ",
    "I want to learn more about ",
    "Describe a vivid scene about ",
    "Write a letter to a friend about ",
    "Make a list of questions about ",
    "Compose a travel article about ",
    "Give a step by step guide to ",
    "Write a dialogue about ",
    "Compare and contrast ",
    "Write a persuasive speech about ",
    "What do you think about ",
)

_CHAT_OTHER = (
    "Imagine you are a ",
    "Pretend to be a pirate and ",
    "You are a doctor. A patient ",
    "Act as a travel guide and ",
    "Suppose that ",
    "Rewrite the following sentence so that it is more polite:",
    "Correct the grammar of this text:",
    "Please translate into French:",
    "Suggest a name for ",
    "If all cats are mammals and ",
    "I feel ",
    "My friend told me that ",
    "How should I prepare for ",
    "Can you recommend ",
    "Describe how to ",
    "Could you explain why ",
    "Which of these is the odd one out:",
    "Take the role of a teacher and explain ",
    "Two friends meet after ten years and ",
    "Three boxes stand on a table.",
    "Classify the following reviews as positive or negative:\n",
    "Extract the names and dates from this text:\n",
    "Hello! ",
    "Give me an example of ",
    "Edit the following paragraph and correct any mistakes:\n\n",
)

_QUESTIONS = (
    "Who wrote ",
    "Who was the first ",
    "Who invented the ",
    "Who is the author of ",
    "Who won the ",
    "who played ",
    "who sings the song ",
    "When did ",
    "When was the ",
    "when was the last time ",
    "When does ",
    "Where is ",
    "Where did the ",
    "where does the name ",
    "What is the capital of ",
    "What is the name of the ",
    "what is the meaning of ",
    "what was the ",
    "What year did ",
    "which country ",
    "Which river ",
    "which is the largest ",
    "How many ",
    "how many episodes ",
    "How long does it take to ",
    "How old is ",
    "How far is ",
    "Why do ",
    "Why is the sky ",
    "Why did the ",
    "what type of ",
    "In which city ",
    "In what year ",
    "Is it true that ",
    "what does it mean when ",
    "name the ",
    "who was the king of ",
    "What causes ",
    "what is the difference between ",
    "How does a ",
    "who is the president of ",
    "when did the movie ",
    "what are the three ",
    "where was the film ",
)

_SUMMARY_ASKS = (
    "Summarize the following article.\n\n",
    "Summarise this text in two sentences:\n\n",
    "Write a summary of the following passage.\n\n",
    "Give me the key points of this report:\n\n",
    "TL;DR this for me:\n\n",
    "What is the main idea of the following paragraph?\n\n",
)

_PASSAGES = (
    "The city council met on Tuesday to discuss ",
    "Scientists have found that ",
    "A new study shows ",
    "In the spring of 1921, ",
    "The company announced on Monday that ",
    "Last week, a group of students ",
    "The river that runs through the valley ",
    "Researchers at the university ",
    "Police said that ",
    "Many people believe that ",
    "The museum will open ",
    "After three years of work, ",
    "The storm that ",
    "Bridges are among the oldest ",
    "Coffee has been ",
    "The team lost ",
    "For centuries, sailors ",
    "A local farmer has ",
    "The new law, which ",
    "When the railway came to the town, ",
)


def sample_starter(rng: random.Random) -> str:
    """Draw the first words of a user turn, all workloads about equally often.

    Args:
        rng: Source of randomness.

    Returns:
        A phrase for the target to continue; it may end in the middle of a sentence.
    """
    workload = rng.choice((_code, _math, _chat, _question, _summary))
    return workload(rng)


def sample_system_prompt(rng: random.Random) -> str | None:
    """Draw a system prompt.

    Args:
        rng: Source of randomness.

    Returns:
        One of `SYSTEM_PROMPTS`, or most often None: the chat template's own.
    """
    return None if rng.random() < DEFAULT_SYSTEM_SHARE else rng.choice(SYSTEM_PROMPTS)


def _code(rng: random.Random) -> str:
    style = rng.random()
    if style < COMPLETION_SHARE:
        return rng.choice(_COMPLETION_ASKS) + rng.choice(_SIGNATURES)
    if style < COMPLETION_SHARE + FUNCTION_SHARE:
        return _shortened(rng.choice(_CODE_ASKS) + rng.choice(_FUNCTION_TASKS), rng)
    return rng.choice(_CODE_OTHER)


def _math(rng: random.Random) -> str:
    numbers = {"a": rng.randint(10, 120), "b": rng.randint(2, 12)}
    if rng.random() < PEOPLE_SHARE:
        return rng.choice(_NAMES) + rng.choice(_MATH_PLOTS).format(**numbers)
    return rng.choice(_MATH_OTHER).format(**numbers)


def _chat(rng: random.Random) -> str:
    if rng.random() < TOPIC_SHARE:
        return _shortened(rng.choice(_CHAT_ASKS) + rng.choice(_TOPICS), rng)
    return rng.choice(_CHAT_OTHER)


def _question(rng: random.Random) -> str:
    return rng.choice(_QUESTIONS)


def _summary(rng: random.Random) -> str:
    return rng.choice(_SUMMARY_ASKS) + rng.choice(_PASSAGES)


def _shortened(text: str, rng: random.Random) -> str:
    # Stopping early lets the target choose the subject, too.
    words: Sequence[str] = text.split(" ")
    keep = len(words) if rng.random() < WHOLE_SHARE else rng.randint(min(4, len(words)), len(words))
    return " ".join(words[:keep])
