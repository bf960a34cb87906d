"""The assignment of rows to columns that is worth most: the Hungarian method, row by row."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def assign(worth: Array) -> Array:
    """A different column for every row so that the sum of worth[row, column] is largest.

    Args:
        worth: [num_rows, num_columns], at least as many columns as rows.
    Source: Kuhn 1955; shortest augmenting paths as in Jonker and Volgenant 1987. O(n^3).
    """
    cost = worth.max(initial=0) - worth
    num_rows, num_columns = cost.shape
    of_row, of_column = np.zeros(num_rows), np.zeros(num_columns + 1)
    row_at = np.full(num_columns + 1, -1)  # the last column stands for the row to be placed
    for row in range(num_rows):
        row_at[num_columns] = row
        column, path = num_columns, np.full(num_columns, num_columns)
        least, seen = np.full(num_columns, np.inf), np.zeros(num_columns + 1, bool)
        while row_at[column] >= 0:
            seen[column] = True
            i = row_at[column]
            reduced = cost[i] - of_row[i] - of_column[:-1]
            nearer = ~seen[:-1] & (reduced < least)
            least[nearer], path[nearer] = reduced[nearer], column
            following = int(np.where(seen[:-1], np.inf, least).argmin())
            step = least[following]
            of_row[row_at[seen]] += step
            of_column[seen] -= step
            least[~seen[:-1]] -= step
            column = following
        while column != num_columns:
            row_at[column] = row_at[path[column]]
            column = path[column]
    columns = np.empty(num_rows, np.int64)
    taken = np.flatnonzero(row_at[:-1] >= 0)
    columns[row_at[taken]] = taken
    return columns
