/* One optimizer step of some rows: their gradients summed, their state and themselves changed, row by row.
 *
 * The arithmetic is that of hybridpar/server/rules.py, which has the sources.
 */

#include "native.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ADAGRAD, ROW_WISE_ADAGRAD, ADAM, ROW_WISE_ADAM };

typedef struct {
  float lr;
  float eps;
  float decay;  /* weight decay that is part of the gradient */
  float shrink; /* by what a row is shrunk apart from it */
  float beta1;
  float beta2;
  float rest1; /* 1 - beta1, from doubles */
  float rest2;
  float root_correction; /* what a second moment's root is divided by */
} Settings;

static float mean_square(const float *grad, int64_t width) {
  float sums[8] = {0};
  int64_t c = 0;
  for (; c + 8 <= width; c += 8) {
    for (int k = 0; k < 8; k++) {
      sums[k] += grad[c + k] * grad[c + k];
    }
  }
  for (; c < width; c++) {
    sums[0] += grad[c] * grad[c];
  }
  float total = ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
  return total / (float)width;
}

static void adagrad(const Settings *s, float *restrict row, float *restrict sum,
                    const float *restrict grad, int64_t width) {
  for (int64_t c = 0; c < width; c++) {
    sum[c] += grad[c] * grad[c];
    row[c] -= s->lr * (grad[c] / (sqrtf(sum[c]) + s->eps));
  }
}

static void row_wise_adagrad(const Settings *s, float *restrict row, float *restrict sum,
                             const float *restrict grad, int64_t width) {
  *sum += mean_square(grad, width);
  add_row(row, grad, -s->lr / (sqrtf(*sum) + s->eps), width);
}

/* From one moment to the next; as torch's lerp, from the nearer end, so that nothing cancels. */
ALWAYS_INLINE float moved(const Settings *s, float moment, float grad) {
  float difference = grad - moment;
  return s->rest1 < 0.5f ? moment + s->rest1 * difference : grad - difference * s->beta1;
}

static void adam(const Settings *s, float *restrict row, float *restrict first,
                 float *restrict second, const float *restrict grad, int64_t width) {
  for (int64_t c = 0; c < width; c++) {
    first[c] = moved(s, first[c], grad[c]);
    second[c] = s->beta2 * second[c] + s->rest2 * (grad[c] * grad[c]);
    float root = sqrtf(second[c]) / s->root_correction + s->eps;
    row[c] -= s->lr * (first[c] / root) + s->shrink * row[c];
  }
}

static void row_wise_adam(const Settings *s, float *restrict row, float *restrict first,
                          float *restrict second, const float *restrict grad, int64_t width) {
  *second = s->beta2 * *second + s->rest2 * mean_square(grad, width);
  float root = sqrtf(*second) / s->root_correction + s->eps;
  for (int64_t c = 0; c < width; c++) {
    first[c] = moved(s, first[c], grad[c]);
    row[c] -= s->lr * (first[c] / root);
  }
}

typedef struct {
  float *rows;
  float *states[2];
  int64_t width;
  int64_t state_widths[2]; /* 0 for none */
} Table;

ALWAYS_INLINE void fetch_all(const Table *t, int64_t row) {
  fetch_row(t->rows + row * t->width, t->width);
  for (int k = 0; k < 2; k++) {
    if (t->state_widths[k]) {
      fetch_row(t->states[k] + row * t->state_widths[k], t->state_widths[k]);
    }
  }
}

static void step_row(int rule, const Settings *s, const Table *t, int64_t number, float *grad) {
  float *row = t->rows + number * t->width;
  float *first = t->states[0] + number * t->state_widths[0];
  float *second = t->state_widths[1] ? t->states[1] + number * t->state_widths[1] : NULL;
  if (s->decay != 0) {
    add_row(grad, row, s->decay, t->width);
  }
  switch (rule) {
    case ADAGRAD: adagrad(s, row, first, grad, t->width); break;
    case ROW_WISE_ADAGRAD: row_wise_adagrad(s, row, first, grad, t->width); break;
    case ADAM: adam(s, row, first, second, grad, t->width); break;
    case ROW_WISE_ADAM: row_wise_adam(s, row, first, second, grad, t->width); break;
  }
}

/* The gradients of several trainers, bag after bag; each where it lies. */
typedef struct {
  int64_t address;
  int64_t num_bags;
} Source;

static const float *gradient_of(const Source *source, int64_t bag, int64_t width) {
  while (bag >= source->num_bags) {
    bag -= source->num_bags;
    source++;
  }
  return (const float *)(uintptr_t)source->address + bag * width;
}

PyObject *step_rows(PyObject *self, PyObject *args) {
  int rule;
  Address table_at, first_at, second_at, rows_at, starts_at, bags_at, sources_at;
  long long num_rows, width, first_width, second_width, found, total, num_bags;
  float factor;
  double beta1, beta2;
  Settings s;
  (void)self;
  if (!PyArg_ParseTuple(args, "iKLLKLKLKKLKLKLfffffddf", &rule, &table_at, &num_rows, &width,
                        &first_at, &first_width, &second_at, &second_width, &rows_at, &starts_at,
                        &found, &bags_at, &total, &sources_at, &num_bags, &factor, &s.lr, &s.eps,
                        &s.decay, &s.shrink, &beta1, &beta2, &s.root_correction)) {
    return NULL;
  }
  s.beta1 = (float)beta1;
  s.beta2 = (float)beta2;
  s.rest1 = (float)(1 - beta1);
  s.rest2 = (float)(1 - beta2);
  Table t = {(float *)(uintptr_t)table_at,
             {(float *)(uintptr_t)first_at, (float *)(uintptr_t)second_at},
             width,
             {first_width, second_width}};
  const int64_t *rows = (const int64_t *)(uintptr_t)rows_at;
  const int64_t *starts = (const int64_t *)(uintptr_t)starts_at;
  const int64_t *bags = (const int64_t *)(uintptr_t)bags_at;
  const Source *sources = (const Source *)(uintptr_t)sources_at;
  float *grad = malloc((size_t)width * sizeof(float));
  if (grad == NULL) {
    return PyErr_NoMemory();
  }
  int64_t wrong;
  int bad_bag;
  Py_BEGIN_ALLOW_THREADS;
  wrong = first_outside(rows, found, num_rows);
  bad_bag = first_outside(bags, total, num_bags) >= 0;
  for (int64_t u = 0; wrong < 0 && !bad_bag && u < found; u++) {
    if (u + AHEAD < found) {
      fetch_all(&t, rows[u + AHEAD]);
    }
    int64_t end = u + 1 < found ? starts[u + 1] : total;
    memset(grad, 0, (size_t)width * sizeof(float));
    for (int64_t i = starts[u]; i < end; i++) {
      add_row(grad, gradient_of(sources, bags[i], width), 1, width);
    }
    for (int64_t c = 0; c < width; c++) {
      grad[c] *= factor;
    }
    step_row(rule, &s, &t, rows[u], grad);
  }
  Py_END_ALLOW_THREADS;
  free(grad);
  if (wrong >= 0) {
    return out_of_range(rows[wrong], num_rows);
  }
  if (bad_bag) {
    return PyErr_Format(PyExc_IndexError, "a bag beyond the %lld gradients", num_bags);
  }
  Py_RETURN_NONE;
}
