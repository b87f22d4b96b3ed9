// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// awaitNode returns the UID of the Node as soon as there is one; empty if ctx ends before. A kubelet makes it anew only when it starts.
func (p *publisher) awaitNode(ctx context.Context) types.UID {
	said := ""
	for {
		node, err := p.client.CoreV1().Nodes().Get(ctx, p.nodeName, metav1.GetOptions{})
		switch {
		case err == nil:
			p.server.read(ctx, node)
			return node.UID
		case ctx.Err() != nil:
			return ""
		case apierrors.IsNotFound(err):
			p.status.accepted(reasonUnauthorized) // only who is known is told that
			if said != err.Error() {
				klog.FromContext(ctx).Info("There is no Node to own the ResourceSlices, waiting for the kubelet to make one", "node", p.nodeName)
			}
		case said != err.Error():
			p.handleError(ctx, fmt.Errorf("read Node %s: %w", p.nodeName, err), "The owner of the ResourceSlices is not known")
		default:
			p.status.refused(err)
		}
		said = err.Error()
		select {
		case <-ctx.Done():
			return ""
		case <-time.After(retryInterval):
		}
	}
}

// whileNode returns when the Node has another UID or is gone, or when ctx ends. Its slices are deleted with it.
func (p *publisher) whileNode(ctx context.Context, uid types.UID) {
	ticker := time.NewTicker(nodeInterval)
	defer ticker.Stop()
	for pause := time.Duration(0); ; {
		var retry <-chan time.Time
		if pause > 0 {
			retry = time.After(pause)
		}
		select {
		case <-ctx.Done():
			return
		case <-p.server.gone:
		case <-retry:
		case <-ticker.C:
		}
		node, err := p.client.CoreV1().Nodes().Get(ctx, p.nodeName, metav1.GetOptions{})
		switch {
		case err == nil && node.UID == uid:
			p.server.read(ctx, node)
			pause = 0
		case err == nil, apierrors.IsNotFound(err):
			klog.FromContext(ctx).Info("The Node that owns the ResourceSlices is gone: they are published again for the next one",
				"node", p.nodeName, "uid", uid)
			return
		default:
			pause = retryInterval
		}
	}
}
