// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"context"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"
)

// Take lists a cluster's objects. It needs the right to list nodes, pods, resourceslices, resourceclaims and deviceclasses; what else
// it may not list is noted in Missing. Kinds that the server does not have are left out. With resources, such as "pods", others are not
// listed.
func Take(ctx context.Context, client kubernetes.Interface, resources ...string) (*Snapshot, error) {
	s := New(Objects{})
	version, err := client.Discovery().ServerVersion()
	if err != nil {
		return nil, fmt.Errorf("ask the API server for its version: %w", err)
	}
	s.ServerVersion = version.GitVersion
	for _, k := range kinds {
		if len(resources) > 0 && !slices.Contains(resources, k.resource) {
			continue
		}
		p := pager.New(func(ctx context.Context, opts metav1.ListOptions) (apiruntime.Object, error) {
			return k.list(ctx, client, opts)
		})
		err := p.EachListItem(ctx, metav1.ListOptions{}, func(item apiruntime.Object) error {
			k.add(&s.Objects, item)
			return nil
		})
		switch {
		case err == nil:
		case k.optional && apierrors.IsNotFound(err):
		case k.optional && apierrors.IsForbidden(err):
			s.Missing = append(s.Missing, Missing{Resource: k.qualified(), Reason: forbidden})
		case apierrors.IsNotFound(err):
			return nil, fmt.Errorf("the API server %s does not serve %s: %w", s.ServerVersion, k.qualified(), err)
		case apierrors.IsForbidden(err):
			return nil, fmt.Errorf("list %s (manifests/kubectl/reader.yaml has the rights that are needed): %w", k.qualified(), err)
		default:
			return nil, fmt.Errorf("list %s: %w", k.qualified(), err)
		}
		k.sort(&s.Objects)
	}
	s.Taken = metav1.Now()
	return s, nil
}

// qualified is the resource as RBAC and kubectl name it: "pods", "resourceclaims.resource.k8s.io".
func (k *kind) qualified() string { return strings.TrimSuffix(k.resource+"."+k.group, ".") }
