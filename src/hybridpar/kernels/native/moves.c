/* Rows read here and there, and gradients added to them: nothing is expanded on the way. */

#include "native.h"

#include <string.h>

PyObject *gather(PyObject *self, PyObject *args) {
  Address source_at, rows_at, out_at;
  long long num_rows, width, count;
  (void)self;
  if (!PyArg_ParseTuple(args, "KLLKLK", &source_at, &num_rows, &width, &rows_at, &count, &out_at)) {
    return NULL;
  }
  const float *source = (const float *)(uintptr_t)source_at;
  const int64_t *rows = (const int64_t *)(uintptr_t)rows_at;
  float *out = (float *)(uintptr_t)out_at;
  int64_t wrong;
  Py_BEGIN_ALLOW_THREADS;
  wrong = first_outside(rows, count, num_rows);
  for (int64_t i = 0; wrong < 0 && i < count; i++) {
    if (i + AHEAD < count) {
      fetch_row(source + rows[i + AHEAD] * width, width);
    }
    memcpy(out + i * width, source + rows[i] * width, (size_t)width * sizeof(float));
  }
  Py_END_ALLOW_THREADS;
  if (wrong >= 0) {
    return out_of_range(rows[wrong], num_rows);
  }
  Py_RETURN_NONE;
}

/* Ids picked out of their bags, before anything is added: a part has every second or so of them, and
 * branching on that while adding costs more than the addition. */
#define PICKED 1024

typedef struct {
  const float *values;
  float *target;
  int64_t width;
  float factor;
  int64_t count;
  int64_t rows[PICKED + 1]; /* one more: written before it is known whether it counts */
  int64_t bags[PICKED + 1];
} Picked;

static void add_picked(Picked *p) {
  for (int64_t i = 0; i < p->count; i++) {
    if (i + AHEAD < p->count) {
      fetch_row(p->target + p->rows[i + AHEAD] * p->width, p->width);
    }
    add_row(p->target + p->rows[i] * p->width, p->values + p->bags[i] * p->width, p->factor,
            p->width);
  }
  p->count = 0;
}

PyObject *add_bags(PyObject *self, PyObject *args) {
  Address target_at, rows_at, offsets_at, values_at;
  long long num_rows, count, num_bags, part, parts, width;
  Picked p = {.count = 0};
  (void)self;
  if (!PyArg_ParseTuple(args, "KLLKLKLKfLL", &target_at, &num_rows, &width, &rows_at, &count,
                        &offsets_at, &num_bags, &values_at, &p.factor, &part, &parts)) {
    return NULL;
  }
  p.target = (float *)(uintptr_t)target_at;
  p.values = (const float *)(uintptr_t)values_at;
  p.width = width;
  const int64_t *rows = (const int64_t *)(uintptr_t)rows_at;
  const int64_t *offsets = (const int64_t *)(uintptr_t)offsets_at; /* NULL: a bag is a row */
  if (!offsets && num_bags != count) {
    return PyErr_Format(PyExc_ValueError, "%lld values for %lld rows", num_bags, count);
  }
  int64_t wrong;
  Py_BEGIN_ALLOW_THREADS;
  wrong = first_outside(rows, count, num_rows);
  for (int64_t bag = 0; wrong < 0 && bag < num_bags; bag++) {
    int64_t begin = offsets ? offsets[bag] : bag;
    int64_t end = !offsets ? bag + 1 : bag + 1 < num_bags ? offsets[bag + 1] : count;
    for (int64_t i = begin < 0 ? 0 : begin; i < end && i < count; i++) {
      p.rows[p.count] = rows[i];
      p.bags[p.count] = bag;
      p.count += is_mine(rows[i], part, parts);
      if (p.count == PICKED) {
        add_picked(&p);
      }
    }
  }
  add_picked(&p);
  Py_END_ALLOW_THREADS;
  if (wrong >= 0) {
    return out_of_range(rows[wrong], num_rows);
  }
  Py_RETURN_NONE;
}
