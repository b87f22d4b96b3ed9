// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryapi

import (
	"context"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/utils/ptr"
)

// Requests are answered as a real API server answers them.
func TestAnswers(t *testing.T) {
	for name, tc := range map[string]struct {
		do   func(ctx context.Context, c kubernetes.Interface, claim *resourceapi.ResourceClaim) error
		is   func(error) bool // nil for no error
		left string           // what is left: nothing, all, or what is being deleted
	}{
		"an update of an old version is a conflict": {
			do: func(ctx context.Context, c kubernetes.Interface, claim *resourceapi.ResourceClaim) error {
				newer := claim.DeepCopy()
				newer.Labels = map[string]string{"a": "b"}
				if _, err := claims(c).Update(ctx, newer, metav1.UpdateOptions{}); err != nil {
					return err
				}
				_, err := claims(c).UpdateStatus(ctx, claim, metav1.UpdateOptions{})
				return err
			},
			is: apierrors.IsConflict, left: "all",
		},
		"a deletion of another object of that name is a conflict": {
			do: func(ctx context.Context, c kubernetes.Interface, claim *resourceapi.ResourceClaim) error {
				return claims(c).Delete(ctx, claim.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions("another")})
			},
			is: apierrors.IsConflict, left: "all",
		},
		"what has a finalizer is only marked": {
			do: func(ctx context.Context, c kubernetes.Interface, claim *resourceapi.ResourceClaim) error {
				claim.Finalizers = []string{"example.com/keep"}
				if _, err := claims(c).Update(ctx, claim, metav1.UpdateOptions{}); err != nil {
					return err
				}
				return claims(c).Delete(ctx, claim.Name, metav1.DeleteOptions{})
			},
			left: "being deleted",
		},
		"and gone with its last finalizer": {
			do: func(ctx context.Context, c kubernetes.Interface, claim *resourceapi.ResourceClaim) error {
				claim.Finalizers = []string{"example.com/keep"}
				if _, err := claims(c).Update(ctx, claim, metav1.UpdateOptions{}); err != nil {
					return err
				}
				if err := claims(c).Delete(ctx, claim.Name, metav1.DeleteOptions{}); err != nil {
					return err
				}
				marked, err := claims(c).Get(ctx, claim.Name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				marked.Finalizers = nil
				_, err = claims(c).Update(ctx, marked, metav1.UpdateOptions{})
				return err
			},
			left: "nothing",
		},
		"a watch that would begin before the compaction is answered with 410": {
			do: func(ctx context.Context, c kubernetes.Interface, claim *resourceapi.ResourceClaim) error {
				w, err := claims(c).Watch(ctx, metav1.ListOptions{ResourceVersion: "1"})
				if err == nil {
					w.Stop()
				}
				return err
			},
			is: apierrors.IsResourceExpired, left: "all",
		},
	} {
		t.Run(name, func(t *testing.T) {
			api := New()
			c := api.Client("user")
			claim, err := claims(c).Create(t.Context(), &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "claim"}}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			api.Compact()
			if err := tc.do(t.Context(), c, claim); err != nil && (tc.is == nil || !tc.is(err)) || err == nil && tc.is != nil {
				t.Errorf("answered with %v", err)
			}
			left := "all"
			if now, err := claims(c).Get(t.Context(), "claim", metav1.GetOptions{}); apierrors.IsNotFound(err) {
				left = "nothing"
			} else if err != nil {
				t.Error(err)
			} else if now.DeletionTimestamp != nil {
				left = "being deleted"
			}
			if left != tc.left {
				t.Errorf("left is %s, want %s", left, tc.left)
			}
		})
	}
}

func claims(c kubernetes.Interface) resourceclient.ResourceClaimInterface {
	return c.ResourceV1().ResourceClaims("ns")
}

// A pod on a node ends with its grace period, or at once if somebody says so. One without a node is gone at once.
func TestPodsEndGracefully(t *testing.T) {
	for name, tc := range map[string]struct {
		bound     bool
		deletions []*int64 // their grace
		gone      bool
	}{
		"on a node":                  {bound: true, deletions: []*int64{nil}},
		"on a node, at once":         {bound: true, deletions: []*int64{ptr.To[int64](0)}, gone: true},
		"on a node, then at once":    {bound: true, deletions: []*int64{nil, ptr.To[int64](0)}, gone: true},
		"on a node, asked for twice": {bound: true, deletions: []*int64{nil, nil}},
		"without a node":             {deletions: []*int64{nil}, gone: true},
	} {
		t.Run(name, func(t *testing.T) {
			pods := New().Client("user").CoreV1().Pods("ns")
			pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v1.PodSpec{TerminationGracePeriodSeconds: ptr.To[int64](60)}}
			if _, err := pods.Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			bind := func() error {
				return pods.Bind(t.Context(), &v1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Target: v1.ObjectReference{Name: "node"}}, metav1.CreateOptions{})
			}
			if tc.bound {
				if err := bind(); err != nil {
					t.Fatal(err)
				}
				if err := bind(); !apierrors.IsConflict(err) {
					t.Errorf("bound twice: %v", err)
				}
			}
			for _, grace := range tc.deletions {
				if err := pods.Delete(t.Context(), "p", metav1.DeleteOptions{GracePeriodSeconds: grace}); err != nil {
					t.Error(err)
				}
			}
			left, err := pods.Get(t.Context(), "p", metav1.GetOptions{})
			switch {
			case tc.gone && !apierrors.IsNotFound(err):
				t.Errorf("it is still there: %v", err)
			case !tc.gone && (err != nil || left.DeletionTimestamp == nil || *left.DeletionGracePeriodSeconds != 60):
				t.Errorf("left is %v, %v", left, err)
			}
		})
	}
}

// A clone has what there is, and goes its own way; lists of nodes begin where they are asked to.
func TestClone(t *testing.T) {
	ctx := context.Background()
	server := New()
	nodes := server.Client("a").CoreV1().Nodes()
	for _, name := range []string{"a", "b", "c"} {
		if _, err := nodes.Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	clone := server.Clone()
	if err := nodes.Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for first, want := range []string{"a b c", "b c a", "c a b"} {
		clone.FirstNode.Store(int64(first))
		list, err := clone.Client("a").CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, node := range list.Items {
			names = append(names, node.Name)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("beginning with node %d: %s, want %s", first, got, want)
		}
	}
	if err := clone.Client("a").CoreV1().Nodes().Delete(ctx, "b", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if list, err := nodes.List(ctx, metav1.ListOptions{}); err != nil || len(list.Items) != 2 || list.Items[0].Name != "b" {
		t.Errorf("the server has %v, %v", list, err)
	}
}
