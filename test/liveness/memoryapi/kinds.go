// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package memoryapi

import (
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
)

// kinds are the kinds of all resources that the client knows.
var kinds = func() map[schema.GroupVersionResource]schema.GroupVersionKind {
	all := map[schema.GroupVersionResource]schema.GroupVersionKind{}
	for gvk := range scheme.Scheme.AllKnownTypes() {
		if strings.HasSuffix(gvk.Kind, "List") {
			continue
		}
		plural, _ := meta.UnsafeGuessKindToResource(gvk)
		all[plural] = gvk
	}
	return all
}()

// request is what a URL and a method mean.
type request struct {
	resource    schema.GroupVersionResource
	kind        schema.GroupVersionKind
	namespace   string
	name        string
	subresource string
}

// parsePath understands /api/v1/… and /apis/group/version/…, without and with namespaces.
func parsePath(path string) (request, bool) {
	var r request
	parts := strings.Split(strings.Trim(path, "/"), "/")
	switch {
	case len(parts) >= 3 && parts[0] == "api":
		r.resource.Version, parts = parts[1], parts[2:]
	case len(parts) >= 4 && parts[0] == "apis":
		r.resource.Group, r.resource.Version, parts = parts[1], parts[2], parts[3:]
	default:
		return r, false
	}
	if parts[0] == "namespaces" && len(parts) >= 3 {
		r.namespace, parts = parts[1], parts[2:]
	}
	r.resource.Resource = parts[0]
	if len(parts) > 1 {
		r.name = parts[1]
	}
	if len(parts) > 2 {
		r.subresource = parts[2]
	}
	var known bool
	r.kind, known = kinds[r.resource]
	return r, known
}

func (r request) groupResource() schema.GroupResource { return r.resource.GroupResource() }

// newObject is an empty object of the request's kind.
func (r request) newObject() runtime.Object {
	object, err := scheme.Scheme.New(r.kind)
	if err != nil {
		panic(err) // it is from the scheme
	}
	return object
}
