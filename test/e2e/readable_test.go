// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"slices"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/test/lab"
)

// waitReadable waits until so many pods of the namespace are bound to the node, and the node may read their claims; those that are named,
// or any. The API server lets a node read a claim when its authorizer has heard of the bound pod, which it is asked here. A kubelet that runs
// may be faster, and tries again only after more than a minute.
func waitReadable(t *testing.T, namespace, nodeName string, count int, names ...string) {
	t.Helper()
	readable := sets.New[string]()
	poll(t, fmt.Sprintf("node %s may read the claims of %d pods %v", nodeName, count, names), func(ctx context.Context) error {
		list, err := cluster.AdminClient().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		waiting := ""
		for _, p := range list.Items {
			if len(names) > 0 && !slices.Contains(names, p.Name) || readable.Has(p.Name) {
				continue
			}
			ok, err := mayRead(ctx, nodeName, &p)
			if err != nil {
				return err
			}
			if ok {
				readable.Insert(p.Name)
			} else {
				waiting = lab.Describe(&p)
			}
		}
		if len(readable) != count {
			return fmt.Errorf("%d of %d; not %s", len(readable), count, waiting)
		}
		return nil
	})
}

// mayRead tells whether the pod is bound to the node, has its claims, and the API server would let the node's kubelet read these.
func mayRead(ctx context.Context, nodeName string, p *corev1.Pod) (bool, error) {
	if p.Spec.NodeName != nodeName || len(p.Status.ResourceClaimStatuses) != len(p.Spec.ResourceClaims) {
		return false, nil
	}
	for _, status := range p.Status.ResourceClaimStatuses {
		if status.ResourceClaimName == nil {
			continue // none is needed
		}
		review, err := cluster.AdminClient().AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{
				User: "system:node:" + nodeName, Groups: []string{"system:nodes", "system:authenticated"},
				ResourceAttributes: &authorizationv1.ResourceAttributes{
					Verb: "get", Group: "resource.k8s.io", Version: "v1", Resource: "resourceclaims", Namespace: p.Namespace, Name: *status.ResourceClaimName,
				},
			},
		}, metav1.CreateOptions{})
		if err != nil || !review.Status.Allowed {
			return false, err
		}
	}
	return true, nil
}
