// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hostile makes objects of the API at its extremes: each passes the API server's validation, and each field is as large, long,
// many, deep or odd as that allows. Nothing else about them is likely. test/integration gives them to a real scheduler, and the fuzz
// targets begin with them. It holds no code of the product.
package hostile
