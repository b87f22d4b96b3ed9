package main

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// nodeInterval is how often the Node is read where it cannot be watched, and at most after a watch has ended.
const nodeInterval = 5 * time.Second

// nodeWatch has the Node as it is: it is read once, and watched from then on, so that a change costs a request and nothing else
// does, however many nodes a cluster has. What it returns is never older than what it has returned before: one of several API
// servers may be behind, and would say that nobody asks for the driver any more. So a first reading, and one after an error,
// as of an API server that does not catch up, is of etcd. It is not to be used concurrently.
type nodeWatch struct {
	client kubernetes.Interface
	name   string
	clock  clock.PassiveClock

	// node is as it was read last, nil with the error that came instead.
	node *corev1.Node
	err  error
	read time.Time // when
	// events are what has come since; nil without a watch.
	events watch.Interface
	// forbidden: an older role lets the agent read its Node, and not watch it.
	forbidden bool
}

// Node returns the Node.
func (w *nodeWatch) Node(ctx context.Context) (*corev1.Node, error) {
	w.follow()
	if w.events != nil || !w.read.IsZero() && w.clock.Since(w.read) < nodeInterval {
		return w.node, w.err
	}
	seen := ""
	if w.node != nil {
		seen = w.node.ResourceVersion
	}
	node, err := w.client.CoreV1().Nodes().Get(ctx, w.name, metav1.GetOptions{ResourceVersion: seen})
	w.node, w.err, w.read = node, err, w.clock.Now()
	if err != nil {
		w.node = nil
		return nil, err
	}
	if !w.forbidden {
		w.watch(ctx)
	}
	return node, nil
}

// follow takes what has come since the last call. A watch that has ended leaves the Node as it was.
func (w *nodeWatch) follow() {
	for w.events != nil {
		select {
		case event, more := <-w.events.ResultChan():
			node, isNode := event.Object.(*corev1.Node)
			switch {
			case more && isNode && event.Type != watch.Deleted:
				w.node = node
			default: // also of an error, as that a version is too old
				w.events.Stop()
				w.events = nil
			}
		default:
			return
		}
	}
}

// watch begins where the Node was read. It outlives the call; the API server ends it within an hour. Without one the Node is read again.
func (w *nodeWatch) watch(ctx context.Context) {
	lives, end := context.WithCancel(context.WithoutCancel(ctx))
	inTime := context.AfterFunc(ctx, end)
	events, err := w.client.CoreV1().Nodes().Watch(lives, metav1.ListOptions{
		FieldSelector:   fields.OneTermEqualSelector(metav1.ObjectNameField, w.name).String(),
		ResourceVersion: w.node.ResourceVersion,
	})
	inTime()
	if err != nil {
		end()
		if w.forbidden = apierrors.IsForbidden(err); w.forbidden {
			klog.FromContext(ctx).Info("The Node may not be watched: it is read again and again, which the role of this version's manifests spares",
				"interval", nodeInterval, "reason", err.Error())
		}
		return
	}
	w.events = events
}
