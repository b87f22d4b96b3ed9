// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Agents do not ask together: what ends the watch of one agent ends that of all that have theirs at the same API server.
const (
	// nodeInterval passes at least, and at most twice that, between two readings of a Node that is not watched, also of one that
	// cannot be read.
	nodeInterval = 5 * time.Second
	// watchEndInterval passes at least, and at most five times that, until the Node is read whose watch has ended.
	watchEndInterval = time.Second
	// forbiddenInterval passes at least until it is tried again to watch a Node that may not be watched. The role of an older version
	// lets the agent only read it, and an API server that has just started may not know the role yet.
	forbiddenInterval = 10 * time.Minute
)

// nodeWatch has the Node as it is: it is read once, and watched from then on, so that a change costs a request and nothing else
// does, however many nodes a cluster has. What it returns is never older than what it has returned before: one of several API
// servers may be behind, and would say that nobody asks for the driver any more. So a first reading, and one after an error,
// as of an API server that does not catch up, is of etcd. It is not to be used concurrently.
type nodeWatch struct {
	client kubernetes.Interface
	name   string
	clock  clock.PassiveClock

	node *corev1.Node // as it was read last, nil after an error
	err  error        // of the last reading
	// read and watch are when that may be done again.
	read, watch time.Time
	// events has what has come since; nil without a watch.
	events *nodeEvents
	// failed is why the Node is not watched, or was not when it was watched last and nothing has come since.
	failed string
}

// Node returns the Node, or why it could not be read when that was tried last.
func (w *nodeWatch) Node(ctx context.Context) (*corev1.Node, error) {
	w.follow(ctx)
	now := w.clock.Now()
	if w.events != nil || now.Before(w.read) {
		return w.node, w.err
	}
	seen := ""
	if w.node != nil {
		seen = w.node.ResourceVersion
	}
	w.node, w.err = w.client.CoreV1().Nodes().Get(ctx, w.name, metav1.GetOptions{ResourceVersion: seen})
	w.read = now.Add(wait.Jitter(nodeInterval, 1))
	if w.err != nil {
		w.node = nil
	} else if !now.Before(w.watch) {
		w.begin(ctx)
	}
	return w.node, w.err
}

// follow takes what has come since the last call. A watch that has ended leaves the Node as it was.
func (w *nodeWatch) follow(ctx context.Context) {
	if w.events == nil {
		return
	}
	node, ended, err := w.events.take()
	if node != nil {
		w.node, w.failed = node, ""
	}
	if !ended {
		return
	}
	w.events = nil
	if err != nil {
		w.notWatched(ctx, err)
	}
	if soon := w.clock.Now().Add(wait.Jitter(watchEndInterval, 4)); w.read.Before(soon) {
		w.read = soon
	}
}

// begin watches from where the Node was read. The watch outlives the call; the API server ends it within an hour. Without one the Node
// is read again.
func (w *nodeWatch) begin(ctx context.Context) {
	lives, end := context.WithCancel(context.WithoutCancel(ctx))
	inTime := context.AfterFunc(ctx, end)
	events, err := w.client.CoreV1().Nodes().Watch(lives, metav1.ListOptions{
		FieldSelector:   fields.OneTermEqualSelector(metav1.ObjectNameField, w.name).String(),
		ResourceVersion: w.node.ResourceVersion,
	})
	inTime()
	if err != nil {
		end()
		w.notWatched(ctx, err)
		return
	}
	w.events = &nodeEvents{}
	go func(of *nodeEvents) { // another takes its place when this one has ended
		defer end()
		of.follow(events)
	}(w.events)
}

// nodeEvents has the newest of what a watch says, taken as it comes: the API server does not wait for who looks at it.
type nodeEvents struct {
	mu    sync.Mutex
	node  *corev1.Node // nil if nothing has come since it was taken
	ended bool
	err   error // that the API server ended it with, as that a version is too old
}

// follow takes what comes until the watch ends.
func (e *nodeEvents) follow(events watch.Interface) {
	defer events.Stop()
	for event := range events.ResultChan() {
		node, isNode := event.Object.(*corev1.Node)
		if !isNode || event.Type == watch.Deleted {
			var err error
			if event.Type == watch.Error {
				err = apierrors.FromObject(event.Object)
			}
			e.set(nil, true, err)
			return
		}
		e.set(node, false, nil)
	}
	e.set(nil, true, nil)
}

func (e *nodeEvents) set(node *corev1.Node, ended bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.node, e.ended, e.err = cmp.Or(node, e.node), ended, err
}

func (e *nodeEvents) take() (node *corev1.Node, ended bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	node, e.node = e.node, nil
	return node, e.ended, e.err
}

// notWatched tells why when that is news.
func (w *nodeWatch) notWatched(ctx context.Context, err error) {
	if apierrors.IsForbidden(err) {
		w.watch = w.clock.Now().Add(wait.Jitter(forbiddenInterval, 1))
	}
	if w.failed != err.Error() {
		w.failed = err.Error()
		klog.FromContext(ctx).Info("The Node is not watched, and is read again and again until it is; this version's role lets it be",
			"interval", nodeInterval, "reason", w.failed)
	}
}
