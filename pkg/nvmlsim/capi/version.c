// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// The version of the driver that this library is of; package install writes another one into a copy of the file.
// It is volatile so that it is read from there.
const volatile char nvmlsimDriver[32] = "any";

const char *nvmlsimDriverVersion(void) { return (const char *)nvmlsimDriver; }
