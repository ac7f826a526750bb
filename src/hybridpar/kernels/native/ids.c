/* Ids looked at and renumbered, without a tensor in between. */

#include "native.h"

PyObject *first_beyond(PyObject *self, PyObject *args) {
  Address rows_at;
  long long count, limit;
  (void)self;
  if (!PyArg_ParseTuple(args, "KLL", &rows_at, &count, &limit)) {
    return NULL;
  }
  return PyLong_FromLongLong(first_outside((const int64_t *)(uintptr_t)rows_at, count, limit));
}

PyObject *in_order(PyObject *self, PyObject *args) {
  Address starts_at;
  long long num_bags, count;
  (void)self;
  if (!PyArg_ParseTuple(args, "KLL", &starts_at, &num_bags, &count)) {
    return NULL;
  }
  const int64_t *starts = (const int64_t *)(uintptr_t)starts_at;
  int fits = num_bags ? starts[0] == 0 && starts[num_bags - 1] <= count : count == 0;
  for (int64_t bag = 1; fits && bag < num_bags; bag++) {
    fits = starts[bag - 1] <= starts[bag];
  }
  return PyBool_FromLong(fits);
}

PyObject *number_bags(PyObject *self, PyObject *args) {
  Address starts_at, out_at;
  long long num_bags, count, first;
  (void)self;
  if (!PyArg_ParseTuple(args, "KLLLK", &starts_at, &num_bags, &count, &first, &out_at)) {
    return NULL;
  }
  const int64_t *starts = (const int64_t *)(uintptr_t)starts_at; /* NULL: an id is a bag */
  int64_t *out = (int64_t *)(uintptr_t)out_at;
  int64_t bag = 0;
  for (int64_t i = 0; i < count; i++) {
    while (starts && bag + 1 < num_bags && starts[bag + 1] <= i) {
      bag++;
    }
    out[i] = first + (starts ? bag : i);
  }
  Py_RETURN_NONE;
}

PyObject *shift(PyObject *self, PyObject *args) {
  Address rows_at, out_at;
  long long count, by;
  (void)self;
  if (!PyArg_ParseTuple(args, "KLLK", &rows_at, &count, &by, &out_at)) {
    return NULL;
  }
  const int64_t *rows = (const int64_t *)(uintptr_t)rows_at;
  int64_t *out = (int64_t *)(uintptr_t)out_at;
  for (int64_t i = 0; i < count; i++) {
    out[i] = rows[i] + by;
  }
  Py_RETURN_NONE;
}
