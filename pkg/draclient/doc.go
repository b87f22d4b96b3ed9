// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package draclient is the caller's side of a DRA plugin's sockets, as the kubelet has it: it asks a registrar who the plugin is
// (GetInfo), keeps a connection to the plugin, and calls NodePrepareResources, NodeUnprepareResources and NodeWatchResources in the newest
// version that both sides know.
//
// A [Client] is one endpoint: one connection made with grpc.NewClient, and with it, at once, every typed client that can speak over
// it. It never changes. What changes is which Client serves a driver, and [Registry] swaps that as one. So there is no client that
// is made on first use, none that is left over from an earlier connection, and none that stays broken after a failed call: a connection
// that is lost is made again by gRPC, under the same clients.
//
// The package knows neither the API server nor the kubelet's folders: finding sockets and deciding what to prepare is the caller's.
package draclient
