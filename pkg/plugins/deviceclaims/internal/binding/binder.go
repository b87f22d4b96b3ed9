// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package binding brings one decided allocation of a claim to the API, and takes it back: the writes with the
// reservation, what became of a write without an answer, whose a reservation is, and whether the devices are ready.
// It knows neither how devices are chosen nor the framework's cycle.
package binding

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/events"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/tracker"
)

// Binder writes claims for one profile. What profiles share is in its [Books].
type Binder struct {
	*Books
	Client kubernetes.Interface
	Clock  clock.Clock
	// Events returns whom events of the profile's pods are told to.
	Events func() events.EventRecorderLogger
	// conditions tells whether devices may have binding conditions (KEP-5007), Timeout how long they may take.
	conditions bool
	Timeout    time.Duration
	// BindPauses are those between conflicts of a binding, UndoPauses those of what is taken back.
	BindPauses, UndoPauses wait.Backoff
	// Grace is how long a binding of a pod without an answer is given to take effect.
	Grace time.Duration
}

// Books are what all profiles of a scheduler know of the claims that it writes.
type Books struct {
	// FieldManager is the name under which this process, and no other, writes to claims.
	FieldManager string
	claims       *tracker.Tracker
	// Places are the pods that are about to be users of claims, turns whose turn it is to write to one.
	Places *places
	turns  *turns
	// Doubts are the claims that may still lose what a pod is about to use.
	Doubts *doubts
	// changed returns a channel that is closed with the next event of a claim.
	changed func(claim types.NamespacedName) <-chan struct{}
	// ended is the context of the scheduler.
	ended context.Context //nolint:containedctx // of the process
}

// NewBooks returns the books of a scheduler.
func NewBooks(ended context.Context, claims *tracker.Tracker, changed func(types.NamespacedName) <-chan struct{}) *Books {
	return &Books{
		FieldManager: newFieldManager(), claims: claims, changed: changed, ended: ended,
		Places: newPlaces(claims.Get), turns: newTurns(), Doubts: newDoubts(claims.Get),
	}
}

// New returns the binder of one profile.
func New(books *Books, handle fwk.Handle, conditions bool, timeout time.Duration) *Binder {
	return &Binder{
		Books: books, Client: handle.ClientSet(), Clock: clock.RealClock{}, Events: handle.EventRecorder,
		conditions: conditions, Timeout: timeout, BindPauses: bindPauses, UndoPauses: undoPauses, Grace: Grace,
	}
}
