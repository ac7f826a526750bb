/* Ids grouped by the row that they mean, by hashing: half the time of sorting them. */

#include "native.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
  int32_t *slots;   /* of the hash table: the number of a row, or -1 */
  int32_t *mine;    /* the positions of the part's ids */
  int32_t *numbers; /* for each of them, the number of its row */
  int shift;        /* from a hash to a slot */
} Scratch;

/* The positions of a part's ids; without a branch, which would be foretold wrongly every second time. */
static int64_t pick(const int64_t *rows, int64_t count, int64_t part, int64_t parts, int32_t *mine) {
  int64_t picked = 0;
  for (int64_t i = 0; i < count; i++) {
    mine[picked] = (int32_t)i;
    picked += is_mine(rows[i], part, parts);
  }
  return picked;
}

/* Numbers the distinct rows of the picked ids in the order in which they come, and counts their ids. */
static int64_t number_rows(const int64_t *rows, int64_t picked, Scratch scratch, int64_t *distinct,
                           int64_t *counts) {
  uint64_t mask = (((uint64_t)1) << (64 - scratch.shift)) - 1;
  int64_t found = 0;
  for (int64_t k = 0; k < picked; k++) {
    int64_t row = rows[scratch.mine[k]];
    uint64_t slot = ((uint64_t)row * 0x9E3779B97F4A7C15u) >> scratch.shift; /* Fibonacci hashing */
    while (scratch.slots[slot] >= 0 && distinct[scratch.slots[slot]] != row) {
      slot = (slot + 1) & mask;
    }
    if (scratch.slots[slot] < 0) {
      scratch.slots[slot] = (int32_t)found;
      distinct[found] = row;
      counts[found] = 0;
      found++;
    }
    scratch.numbers[k] = scratch.slots[slot];
    counts[scratch.numbers[k]]++;
  }
  return found;
}

PyObject *group(PyObject *self, PyObject *args) {
  Address rows_at, bags_at, distinct_at, starts_at, order_at;
  long long count, part, parts;
  (void)self;
  if (!PyArg_ParseTuple(args, "KKLLLKKK", &rows_at, &bags_at, &count, &part, &parts, &distinct_at,
                        &starts_at, &order_at)) {
    return NULL;
  }
  const int64_t *rows = (const int64_t *)(uintptr_t)rows_at;
  const int64_t *bags = (const int64_t *)(uintptr_t)bags_at; /* NULL: an id is its own */
  int64_t *distinct = (int64_t *)(uintptr_t)distinct_at;
  int64_t *starts = (int64_t *)(uintptr_t)starts_at;
  int64_t *order = (int64_t *)(uintptr_t)order_at;
  if (count > INT32_MAX / 4) {
    return PyErr_Format(PyExc_ValueError, "%lld ids at once", count);
  }
  Scratch scratch = {.shift = 62};
  while ((((int64_t)1) << (64 - scratch.shift)) < 2 * count) {
    scratch.shift--;
  }
  size_t num_slots = ((size_t)1) << (64 - scratch.shift);
  scratch.slots = malloc((num_slots + 2 * (size_t)count + 1) * sizeof(int32_t));
  if (scratch.slots == NULL) {
    return PyErr_NoMemory();
  }
  scratch.numbers = scratch.slots + num_slots;
  scratch.mine = scratch.numbers + count; /* one more: written before it is known whether it counts */
  int64_t found, total = 0;
  Py_BEGIN_ALLOW_THREADS;
  memset(scratch.slots, -1, num_slots * sizeof(int32_t));
  int64_t picked = pick(rows, count, part, parts, scratch.mine);
  found = number_rows(rows, picked, scratch, distinct, starts);
  int32_t *next = scratch.slots; /* no longer needed: where a row's next id goes */
  for (int64_t u = 0; u < found; u++) {
    int64_t own = starts[u];
    starts[u] = total;
    next[u] = (int32_t)total;
    total += own;
  }
  for (int64_t k = 0; k < picked; k++) {
    int64_t i = scratch.mine[k];
    order[next[scratch.numbers[k]]++] = bags ? bags[i] : i;
  }
  free(scratch.slots);
  Py_END_ALLOW_THREADS;
  return Py_BuildValue("LL", (long long)found, (long long)total);
}
