"""Small tables with the columns and oddities of well-known public ones, made anew."""

import csv
import datetime
import decimal
import gzip
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet

ROWS = 400


class Table(NamedTuple):
    """A table.

    Attributes:
        file: name of its file.
        content: of the file.
        test: content of a file without labels, if that is known to differ.
        label: what --label_column has to say; None where the default is right.
    """

    file: str
    content: bytes
    test: bytes
    label: str | None


def _text(names, rows, separator=",", style=csv.QUOTE_MINIMAL, end="\n"):
    written = io.StringIO(newline="")
    writer = csv.writer(written, delimiter=separator, quoting=style, lineterminator=end)
    writer.writerows([names, *rows])
    return written.getvalue()


def _table(
    name: str,
    columns: dict[str, Sequence[Any]],
    target: str,
    asks: bool = False,
    change: Callable[[str], bytes] = str.encode,
    suffix: str = "csv",
    **style: Any,
) -> Table:
    """Writes the columns, and a test file without the target.

    Args:
        name: of the table.
        columns: cells of each column.
        target: the column to predict.
        asks: whether a user has to name it.
        change: makes bytes of text.
        suffix: of the file.
        **style: of `_text`.
    """
    rows = [*zip(*columns.values(), strict=True)]
    whole = _text([*columns], rows, **style)
    others = {key: cells for key, cells in columns.items() if key != target}
    rows = [*zip(*others.values(), strict=True)][:20]
    test = _text([*others], rows, **style)
    label = target if asks else None
    return Table(f"{name}.{suffix}", change(whole), change(test), label)


def _draw(seed):
    return np.random.default_rng(seed)


def _some(draw, cells, missing, part):
    """Writes what is missing in place of a part of the cells."""
    return [missing if draw.random() < part else cell for cell in cells]


def _one_of(draw, cells, count=ROWS):
    return [cells[k] for k in draw.integers(0, len(cells), count)]


def titanic() -> Table:
    """Names with commas in quotes, empty ages and cabins, tickets of any form."""
    d = _draw(1)
    survived = d.integers(0, 2, ROWS)
    names = [f'Doe{k}, Mr. John "J{k}"' for k in range(ROWS)]
    return _table(
        "titanic",
        {
            "PassengerId": range(1, ROWS + 1),
            "Survived": survived,
            "Pclass": d.integers(1, 4, ROWS),
            "Name": names,
            "Sex": np.where(survived + d.random(ROWS) > 0.8, "female", "male"),
            "Age": _some(d, d.integers(1, 80, ROWS), "", 0.2),
            "SibSp": d.integers(0, 5, ROWS),
            "Ticket": [f"A/5 {n}" for n in d.integers(0, 10**6, ROWS)],
            "Fare": d.uniform(5, 500, ROWS).round(4),
            "Cabin": _some(d, [f"C{n}" for n in d.integers(1, 200, ROWS)], "", 0.77),
            "Embarked": _some(d, _one_of(d, "SCQ"), "", 0.01),
        },
        "Survived",
        asks=True,
    )


def adult() -> Table:
    """Spaces behind commas, question marks, and <=50K to predict."""
    d = _draw(2)
    age = d.integers(17, 90, ROWS)
    return _table(
        "adult",
        {
            "age": age,
            "workclass": _some(d, _one_of(d, ["Private", "State-gov"]), "?", 0.06),
            "fnlwgt": d.integers(12285, 10**6, ROWS),
            "education": _one_of(d, ["Bachelors", "HS-grad", "11th"]),
            "occupation": _some(d, _one_of(d, ["Sales", "Tech-support"]), "?", 0.06),
            "hours-per-week": d.integers(1, 99, ROWS),
            "native-country": _some(d, ["United-States"] * ROWS, "?", 0.02),
            "income": np.where(age + d.normal(0, 9, ROWS) > 50, ">50K", "<=50K"),
        },
        "income",
        change=lambda text: text.replace(",", ", ").encode(),
    )


def wine() -> Table:
    """Semicolons, names in quotes with spaces, and a quality of 3 to 8."""
    d = _draw(3)
    names = ["fixed acidity", "citric acid", "pH", "alcohol"]
    columns = {name: d.uniform(2, 12, ROWS).round(2) for name in names}
    columns["quality"] = d.integers(3, 9, ROWS)
    return _table(
        "winequality-red", columns, "quality", separator=";", style=csv.QUOTE_NONNUMERIC
    )


def houses() -> Table:
    """81 columns, of which one is Id; NA as a text and as a number; prices."""
    d = _draw(4)
    columns = {"Id": range(1, ROWS + 1)}
    for k in range(39):
        columns[f"Num{k}"] = _some(d, d.integers(0, 2000, ROWS), "NA", k / 200)
        columns[f"Kind{k}"] = _some(d, _one_of(d, ["Gd", "TA", "Ex"]), "NA", k / 39)
    columns["YrSold"] = d.integers(2006, 2011, ROWS)
    columns["SalePrice"] = d.integers(34_900, 755_000, ROWS)
    return _table("house-prices", columns, "SalePrice")


def bank() -> Table:
    """Semicolons, texts in quotes, yes and no."""
    d = _draw(5)
    return _table(
        "bank-full",
        {
            "age": d.integers(18, 95, ROWS),
            "job": _one_of(d, ["admin.", "blue-collar", "unknown"]),
            "balance": d.integers(-8000, 100_000, ROWS),
            "housing": _one_of(d, ["yes", "no"]),
            "day": d.integers(1, 32, ROWS),
            "month": _one_of(d, ["may", "jun", "nov"]),
            "pdays": _some(d, d.integers(1, 800, ROWS), -1, 0.8),
            "y": np.where(d.random(ROWS) < 0.11, "yes", "no"),
        },
        "y",
        separator=";",
        style=csv.QUOTE_NONNUMERIC,
    )


def iris() -> Table:
    """Nothing odd."""
    d = _draw(6)
    kinds = d.integers(0, 3, 150)
    names = ["sepal_length", "sepal_width", "petal_length", "petal_width"]
    columns = {name: (kinds + d.normal(3, 0.4, 150)).round(1) for name in names}
    columns["species"] = np.array(["setosa", "versicolor", "virginica"])[kinds]
    return _table("iris", columns, "species")


def covertype() -> Table:
    """54 columns of numbers, 44 of them 0 or 1, and classes from 1 to 7."""
    d = _draw(7)
    columns = {f"Measure{k}": d.integers(0, 4000, ROWS) for k in range(10)}
    soil = d.integers(1, 41, ROWS)
    columns |= {f"Wilderness_Area{k}": d.integers(0, 2, ROWS) for k in range(1, 5)}
    columns |= {f"Soil_Type{k}": (soil == k).astype(int) for k in range(1, 41)}
    columns["Cover_Type"] = d.integers(1, 8, ROWS)
    return _table("covtype", columns, "Cover_Type")


def fraud() -> Table:
    """0.5% of the rows are positive."""
    d = _draw(8)
    columns = {"Time": np.sort(d.integers(0, 172_792, 2000)).astype(float)}
    columns |= {f"V{k}": d.normal(size=2000) for k in range(1, 29)}
    columns["Amount"] = d.exponential(88, 2000).round(2)
    columns["Class"] = (np.arange(2000) % 200 == 7).astype(int)
    return _table("creditcard", columns, "Class", style=csv.QUOTE_NONE)


def california() -> Table:
    """Numbers with few empty cells, a category behind the target."""
    d = _draw(9)
    income = d.uniform(0.5, 15, ROWS)
    return _table(
        "housing",
        {
            "longitude": d.uniform(-124, -114, ROWS).round(2),
            "latitude": d.uniform(32, 42, ROWS).round(2),
            "total_bedrooms": _some(d, d.integers(1, 6000, ROWS) * 1.0, "", 0.01),
            "median_income": income.round(4),
            "median_house_value": (income * 30_000).round() // 100 * 100.0,
            "ocean_proximity": _one_of(d, ["NEAR BAY", "<1H OCEAN", "INLAND"]),
        },
        "median_house_value",
        asks=True,
    )


def mushrooms() -> Table:
    """Letters only; the class stands first; one column is constant; ? is missing."""
    d = _draw(10)
    columns = {"class": _one_of(d, "ep"), "cap-shape": _one_of(d, "xbsfk")}
    columns |= {"gill-color": _one_of(d, "knwgp"), "veil-type": ["p"] * ROWS}
    columns["stalk-root"] = _some(d, _one_of(d, "bcer"), "?", 0.3)
    return _table("mushrooms", columns, "class")


def air() -> Table:
    """Semicolons, decimal commas, dates of Italy, two empty columns, empty rows."""
    d = _draw(11)
    hours = [datetime.datetime(2004, 3, 10, 18) + datetime.timedelta(hours=k)
             for k in range(ROWS)]  # fmt: skip

    def commas(cells):
        return [str(cell).replace(".", ",") for cell in cells]

    columns = {
        "Date": [hour.strftime("%d/%m/%Y") for hour in hours],
        "Time": [hour.strftime("%H.%M.%S") for hour in hours],
        "PT08.S1(CO)": d.integers(600, 2000, ROWS),
        "NMHC(GT)": _some(d, d.integers(7, 1200, ROWS), -200, 0.9),
        "C6H6(GT)": commas(d.uniform(0, 60, ROWS).round(1)),
        "T": commas(d.uniform(-2, 44, ROWS).round(1)),
        "CO(GT)": commas(_some(d, d.uniform(0, 12, ROWS).round(1), -200, 0.1)),
    }

    def change(text):
        header, *rows = text.splitlines()
        empty = ";" * (header.count(";") + 2)
        return "\r\n".join([*(f"{row};;" for row in [header, *rows]), *[empty] * 9]
                           ).encode()  # fmt: skip

    return _table("AirQualityUCI", columns, "CO(GT)", True, change, separator=";")


def fires() -> Table:
    """Names of months and days; areas, of which half are 0."""
    d = _draw(12)
    return _table(
        "forestfires",
        {
            "X": d.integers(1, 10, ROWS),
            "month": _one_of(d, ["mar", "aug", "sep"]),
            "day": _one_of(d, ["fri", "sat", "sun"]),
            "DC": d.uniform(7, 860, ROWS).round(1),
            "rain": _some(d, d.uniform(0, 6, ROWS).round(1), 0, 0.95),
            "area": _some(d, d.exponential(12, ROWS).round(2), 0.0, 0.5),
        },
        "area",
    )


def abalone() -> Table:
    """Rings, 1 to 29, which people learn as numbers."""
    d = _draw(13)
    rings = d.integers(1, 30, ROWS)
    columns = {"Sex": _one_of(d, "MFI"), "Length": (rings / 40).round(3)}
    columns |= {"Whole weight": (rings / 30 + 0.1).round(4), "Rings": rings}
    return _table("abalone", columns, "Rings")


def breast() -> Table:
    """An id, M and B behind it, and a comma at the end of each row."""
    d = _draw(14)
    kinds = d.integers(0, 2, ROWS)
    columns = {"id": d.permutation(10**6)[:ROWS] + 842_302}
    columns["diagnosis"] = np.where(kinds, "M", "B")
    for name in ("radius_mean", "texture_mean", "area_mean", "concavity_mean"):
        columns[name] = (kinds + d.normal(14, 1, ROWS)).round(3)

    def change(text):
        header, *rows = text.splitlines()
        return "\n".join([f'{header},""', *(f"{row}," for row in rows)]).encode()

    return _table("breast-cancer", columns, "diagnosis", True, change)


def heart() -> Table:
    """Question marks among numbers, and a target of 0 to 4."""
    d = _draw(15)
    return _table(
        "heart-cleveland",
        {
            "age": d.integers(29, 78, ROWS) * 1.0,
            "sex": d.integers(0, 2, ROWS) * 1.0,
            "chol": _some(d, d.integers(126, 565, ROWS) * 1.0, "?", 0.05),
            "ca": _some(d, d.integers(0, 4, ROWS) * 1.0, "?", 0.02),
            "num": d.integers(0, 5, ROWS),
        },
        "num",
    )


def telco() -> Table:
    """An id of letters, charges of which some are a space, Yes and No."""
    d = _draw(16)
    months = d.integers(0, 73, ROWS)
    charges = d.uniform(18, 119, ROWS).round(2)
    total = (months * charges).round(2)
    return _table(
        "telco-churn",
        {
            "customerID": [f"{k:04}-{'ABCD'[k % 4]}X{k * 7}" for k in range(ROWS)],
            "gender": _one_of(d, ["Female", "Male"]),
            "SeniorCitizen": d.integers(0, 2, ROWS),
            "tenure": months,
            "Contract": _one_of(d, ["Month-to-month", "One year", "Two year"]),
            "MonthlyCharges": charges,
            "TotalCharges": [
                t if m else " " for t, m in zip(total, months, strict=True)
            ],
            "Churn": _one_of(d, ["Yes", "No"]),
        },
        "Churn",
    )


def spaceship() -> Table:
    """Truth values with empty cells, cabins, names; True or False to predict."""
    d = _draw(17)
    return _table(
        "spaceship-titanic",
        {
            "PassengerId": [f"{k:04}_01" for k in range(1, ROWS + 1)],
            "HomePlanet": _some(d, _one_of(d, ["Europa", "Earth"]), "", 0.02),
            "CryoSleep": _some(d, _one_of(d, ["True", "False"]), "", 0.02),
            "Cabin": _some(d, [f"F/{k}/S" for k in range(ROWS)], "", 0.02),
            "Age": _some(d, d.integers(0, 80, ROWS) * 1.0, "", 0.02),
            "RoomService": _some(d, d.integers(0, 900, ROWS) * 1.0, "", 0.02),
            "Name": [f"Juanna Vines{k}" for k in range(ROWS)],
            "Transported": _one_of(d, ["True", "False"]),
        },
        "Transported",
    )


def taxi() -> Table:
    """Two moments in each row, Y and N, and seconds to predict."""
    d = _draw(18)
    begins = [
        datetime.datetime(2016, 3, 14) + datetime.timedelta(seconds=int(s))
        for s in d.integers(0, 8_000_000, ROWS)
    ]
    seconds = d.integers(60, 3600, ROWS)
    return _table(
        "nyc-taxi",
        {
            "id": [f"id{n}" for n in d.permutation(4 * 10**6)[:ROWS]],
            "vendor_id": d.integers(1, 3, ROWS),
            "pickup_datetime": [str(begin) for begin in begins],
            "passenger_count": d.integers(1, 7, ROWS),
            "pickup_longitude": d.uniform(-74.1, -73.7, ROWS),
            "store_and_fwd_flag": _some(d, ["N"] * ROWS, "Y", 0.05),
            "trip_duration": seconds,
        },
        "trip_duration",
    )


def sales() -> Table:
    """A date, a store, a family of goods, sales with fractions."""
    d = _draw(19)
    first = datetime.date(2013, 1, 1)
    return _table(
        "store-sales",
        {
            "id": range(ROWS),
            "date": [first + datetime.timedelta(days=k // 20) for k in range(ROWS)],
            "store_nbr": d.integers(1, 55, ROWS),
            "family": _one_of(d, ["AUTOMOTIVE", "BABY CARE", "BREAD/BAKERY"]),
            "onpromotion": d.integers(0, 3, ROWS),
            "sales": d.exponential(30, ROWS).round(3),
        },
        "sales",
    )


def excel() -> Table:
    """A mark of UTF-8, semicolons, decimal commas, umlauts, lines of Windows."""
    d = _draw(20)
    place = d.integers(0, 3, ROWS)
    columns = {
        "Straße": _one_of(d, ["Hauptstraße", "Königsweg"]),
        "Fläche": [f"{a:.1f}".replace(".", ",") for a in d.uniform(20, 200, ROWS)],
        "Räume": d.integers(1, 7, ROWS),
        "Lage": np.array(["gut", "mäßig", "schlecht"])[place],
    }
    return _table(
        "excel", columns, "Lage", False, lambda text: text.encode("utf-8-sig"),
        separator=";", end="\r\n",
    )  # fmt: skip


def genes() -> Table:
    """60 rows of 5,000 numbers, an unnamed column of samples first; compressed."""
    d = _draw(21)
    kinds = d.integers(0, 5, 60)
    columns = {"": [f"sample_{k}" for k in range(60)]}
    levels = (d.normal(kinds[:, None], 1, [60, 5000])).round(4)
    columns |= {f"gene_{k}": levels[:, k] for k in range(5000)}
    columns["Class"] = np.array(["BRCA", "KIRC", "COAD", "LUAD", "PRAD"])[kinds]
    return _table(
        "genes", columns, "Class", change=lambda text: gzip.compress(text.encode()),
        suffix="csv.gz",
    )  # fmt: skip


def spam() -> Table:
    """Two columns with a tab between: the class and the text."""
    d = _draw(22)
    kinds = d.integers(0, 2, ROWS)
    words = [["lunch", "home", "ok,"], ["WIN", "cash!", "£100"]]
    texts = [f"{' '.join(_one_of(d, words[k], 8))} {n}" for n, k in enumerate(kinds)]
    columns = {"label": np.array(["ham", "spam"])[kinds], "message": texts}
    return _table("sms-spam", columns, "label", separator="\t", suffix="tsv")


def nested() -> Table:
    """Parquet with decimals, dictionaries, lists, nulls, truth values and dates."""
    d = _draw(23)
    cents = [decimal.Decimal(int(n)) / 100 for n in d.integers(0, 10**6, ROWS)]
    days = [datetime.date(2020, 1, 1) + datetime.timedelta(days=k % 90)
            for k in range(ROWS)]  # fmt: skip
    columns = {
        "price": pa.array(cents, pa.decimal128(12, 2)),
        "city": pa.array(_one_of(d, ["Bonn", "Rome"])).dictionary_encode(),
        "tags": pa.array([["a"] * (k % 3) for k in range(ROWS)]),
        "is_new": pa.array(_some(d, [True, False] * (ROWS // 2), None, 0.1)),
        "day": pa.array(days),
        "nothing": pa.nulls(ROWS),
        "label": pa.array(d.integers(0, 3, ROWS), pa.int8()),
    }
    whole = pa.table(columns)

    def content(table):
        file = io.BytesIO()
        parquet.write_table(table, file)
        return file.getvalue()

    test = whole.drop_columns("label").slice(0, 20)
    return Table("nested.parquet", content(whole), content(test), None)


ALL = {
    make.__name__: make
    for make in (
        *(titanic, adult, wine, houses, bank, iris, covertype, fraud, california),
        *(mushrooms, air, fires, abalone, breast, heart, telco, spaceship, taxi),
        *(sales, excel, genes, spam, nested),
    )
}
