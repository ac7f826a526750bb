/* The module `hybridpar.kernels._native`; its _native.pyi has the signatures. */

#include "native.h"

int64_t first_outside(const int64_t *rows, int64_t count, int64_t num_rows) {
  for (int64_t i = 0; i < count; i++) {
    if (rows[i] < 0 || rows[i] >= num_rows) {
      return i;
    }
  }
  return -1;
}

PyObject *out_of_range(int64_t row, int64_t num_rows) {
  return PyErr_Format(PyExc_IndexError, "row %lld of a table of %lld rows", (long long)row,
                      (long long)num_rows);
}

static PyMethodDef methods[] = {
    {"add_bags", add_bags, METH_VARARGS, NULL},
    {"gather", gather, METH_VARARGS, NULL},
    {"first_beyond", first_beyond, METH_VARARGS, NULL},
    {"in_order", in_order, METH_VARARGS, NULL},
    {"number_bags", number_bags, METH_VARARGS, NULL},
    {"shift", shift, METH_VARARGS, NULL},
    {"group", group, METH_VARARGS, NULL},
    {"step_rows", step_rows, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Moves of rows, compiled.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
