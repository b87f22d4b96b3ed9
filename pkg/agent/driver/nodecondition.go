// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	coreapply "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/stepaside"
)

const (
	// judgeInterval is how often the node is judged, of which the API server sees nothing.
	judgeInterval = 2 * time.Second
	// readNodeInterval is how often the Node is read although the verdict is the same: it may have been made anew, or the condition removed.
	readNodeInterval = time.Minute
	// retryNodeInterval is how long after an error it is tried again.
	retryNodeInterval = 10 * time.Second
)

// nodeCondition keeps the condition of the Node as it should be. Of two agents of a node only the one that publishes does.
type nodeCondition struct {
	client kubernetes.Interface
	node   string
	// leads is closed when this is the agent that publishes.
	leads <-chan struct{}
	// awaitFirstLooks waits until it is known what the agent before knew, or for not too long: a restart must not turn the condition.
	awaitFirstLooks func(ctx context.Context)
	// view is what is known of the node; ok is false while that is too little.
	view func() (v nodeView, ok bool)
	// status is told whether the API server takes the agent's token.
	status *Status
	// said is the error that was logged last.
	said string
}

// run writes the condition at each change until ctx ends.
func (n *nodeCondition) run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "node"))
	select {
	case <-ctx.Done():
		return
	case <-n.leads:
	}
	n.awaitFirstLooks(ctx)
	ticker := time.NewTicker(judgeInterval)
	defer ticker.Stop()
	var written corev1.NodeCondition
	var due time.Time // of the next reading of the Node
	for {
		if v, ok := n.view(); ok {
			c := judgeNode(v)
			// A token that was refused once is tried at once: it may have been renewed, and the devices need not be taken out.
			_, why := n.status.get(stageAccepted)
			isNew := !sameCondition(&c, &written) || why.reason == reasonUnauthorized
			if now := time.Now(); !now.Before(due) || isNew && n.said == "" {
				due = now.Add(readNodeInterval)
				if err := n.write(ctx, c); err != nil {
					due = now.Add(retryNodeInterval)
					switch {
					case apierrors.IsUnauthorized(err):
						n.status.refused(err)
					case apierrors.IsForbidden(err), apierrors.IsNotFound(err):
						n.status.accepted(reasonUnauthorized) // only who is known is told that
					}
					n.tell(ctx, err)
				} else {
					n.status.accepted(reasonUnauthorized)
					written, n.said = c, ""
				}
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// tell logs what is new, once.
func (n *nodeCondition) tell(ctx context.Context, err error) {
	if ctx.Err() == nil && err.Error() != n.said {
		n.said = err.Error()
		utilruntime.HandleErrorWithContext(ctx, err, "The condition of the Node cannot be written, trying on",
			"node", n.node, "condition", ConditionGPUsReady, "after", retryNodeInterval)
	}
}

// write applies the condition, and nothing else of the Node, unless it is there already.
func (n *nodeCondition) write(ctx context.Context, c corev1.NodeCondition) error {
	node, err := n.client.CoreV1().Nodes().Get(ctx, n.node, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read Node %s: %w", n.node, err)
	}
	now := metav1.Now()
	since := now
	for i := range node.Status.Conditions {
		was := &node.Status.Conditions[i]
		if was.Type != c.Type {
			continue
		}
		if sameCondition(was, &c) {
			return nil
		}
		if was.Status == c.Status {
			since = was.LastTransitionTime
		}
	}
	config := coreapply.Node(node.Name).WithUID(node.UID).WithStatus(coreapply.NodeStatus().WithConditions(
		coreapply.NodeCondition().WithType(c.Type).WithStatus(c.Status).WithReason(c.Reason).WithMessage(c.Message).
			WithLastHeartbeatTime(now).WithLastTransitionTime(since)))
	_, err = n.client.CoreV1().Nodes().ApplyStatus(ctx, config, metav1.ApplyOptions{FieldManager: Name, Force: true})
	if apierrors.IsForbidden(err) {
		err = fmt.Errorf("the agent may not write it; the manifests grant patch on nodes/status: %w", err)
	}
	if err != nil {
		return fmt.Errorf("write the status of Node %s: %w", n.node, err)
	}
	klog.FromContext(ctx).Info("Condition of the Node is written",
		"node", n.node, "condition", c.Type, "status", c.Status, "reason", c.Reason, "message", c.Message)
	return nil
}

// sameCondition tells whether both say the same.
func sameCondition(a, b *corev1.NodeCondition) bool {
	return a.Type == b.Type && a.Status == b.Status && a.Reason == b.Reason && a.Message == b.Message
}

// readinessChanged takes the devices out when claims cannot be prepared on this node, and back in when they can.
func (n *onNode) readinessChanged(_ context.Context, p *problem) {
	if aside := n.aside.Load(); aside != nil {
		p = aside
	}
	reason := ""
	if p != nil {
		reason = p.reason
	}
	if !n.withheld.setNotReady(reason) {
		return
	}
	n.refresh()
	if p != nil {
		n.reporter.nodeEventf(corev1.EventTypeWarning, reasonCannotPrepare, "Claims cannot be prepared on this node: %s", p.message)
	} else {
		n.reporter.nodeEventf(corev1.EventTypeNormal, reasonCanPrepare, "Claims can be prepared on this node again")
	}
}

// Aside implements stepaside.Driver: the devices are taken out. The agent is ready all the same, as without a driver: in
// an update the other agent ends once this one is.
func (a *Agent) Aside(ctx context.Context, why *stepaside.Why) {
	a.onNode.aside.Store(&problem{why.Reason, why.Message})
	a.status.fail(stageGPUs, why.Reason, why.Message)
	a.onNode.readinessChanged(ctx, nil)
}

// Close implements stepaside.Driver.
func (a *Agent) Close(ctx context.Context) error { return a.opts.Hardware.Close(ctx) }
