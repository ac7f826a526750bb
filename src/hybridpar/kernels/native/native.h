/* What the compiled kernels have in common.
 *
 * Addresses come from Python as integers, of contiguous tensors: float32 values, int64 numbers. Every number
 * of a row is looked at before it is used. What takes long releases the GIL, so that threads work beside each
 * other.
 */

#ifndef HYBRIDPAR_NATIVE_H
#define HYBRIDPAR_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define AHEAD 12 /* rows that memory is asked for before they are needed */
#define LINE 16  /* floats in a cache line */

#if defined(__GNUC__)
#define FETCH(address) __builtin_prefetch((address), 1, 3)
#define ALWAYS_INLINE static inline __attribute__((always_inline)) /* or GCC takes out what only fetches */
#else
#define FETCH(address) ((void)(address))
#define ALWAYS_INLINE static inline
#endif

typedef unsigned long long Address;

ALWAYS_INLINE void fetch_row(const float *row, int64_t width) {
  for (int64_t c = 0; c < width; c += LINE) {
    FETCH(row + c);
  }
  FETCH(row + width - 1); /* a row need not begin where a line does */
}

/* Rows are dealt to the parts of an update by their last bits: parts is a power of two. */
ALWAYS_INLINE int is_mine(int64_t row, int64_t part, int64_t parts) {
  return (row & (parts - 1)) == part;
}

/* to[c] += factor * from[c]; the widths of common tables let the compiler unroll. */
ALWAYS_INLINE void add_row(float *restrict to, const float *restrict from, float factor,
                           int64_t width) {
#define UNROLLED(W)                     \
  case W:                               \
    for (int64_t c = 0; c < (W); c++) { \
      to[c] += factor * from[c];        \
    }                                   \
    return
  switch (width) {
    UNROLLED(8);
    UNROLLED(16);
    UNROLLED(32);
    UNROLLED(64);
    UNROLLED(128);
  }
#undef UNROLLED
  for (int64_t c = 0; c < width; c++) {
    to[c] += factor * from[c];
  }
}

/* The first of some rows that a table of so many has not; -1 if it has all. */
int64_t first_outside(const int64_t *rows, int64_t count, int64_t num_rows);

/* Raises IndexError for such a row. */
PyObject *out_of_range(int64_t row, int64_t num_rows);

PyObject *add_bags(PyObject *self, PyObject *args);
PyObject *gather(PyObject *self, PyObject *args);
PyObject *first_beyond(PyObject *self, PyObject *args);
PyObject *in_order(PyObject *self, PyObject *args);
PyObject *number_bags(PyObject *self, PyObject *args);
PyObject *shift(PyObject *self, PyObject *args);
PyObject *group(PyObject *self, PyObject *args);
PyObject *step_rows(PyObject *self, PyObject *args);

#endif
