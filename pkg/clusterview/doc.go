// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package clusterview joins the objects of a snapshot to what people ask for: GPUs with their holders, claims with their devices and
// pods, links, and what still fits. It decides nothing and knows no client. Devices of any DRA driver are in it; attributes are read
// by the names that NVIDIA's driver gives them, and what a driver does not publish is empty.
package clusterview
