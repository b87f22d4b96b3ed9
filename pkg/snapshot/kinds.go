// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
)

// kind is how objects of one kind get into a snapshot and out of it.
type kind struct {
	// field is its name in the file, resource that in RBAC, group that of its API.
	field, resource, group string
	// optional: without these objects, the commands that do not need them still answer.
	optional bool
	list     func(context.Context, kubernetes.Interface, metav1.ListOptions) (apiruntime.Object, error)
	// add puts an object of a list into the snapshot, trimmed. It may change the object.
	add    func(*Objects, apiruntime.Object)
	sort   func(*Objects)
	detach func(*Objects)
	// decode reads objects of a file, of which the first is at that index. They are not in the snapshot before they are put there.
	decode func(options jsonv2.Options, first int, raw []json.RawMessage) (put func(*Objects), err error)
	names  func(*Objects) []metav1.Object
}

// object is what *T is for each kind T.
type object[T any] interface {
	*T
	metav1.Object
	apiruntime.Object
}

// kindOf makes a kind from the place of its list in Objects.
func kindOf[T any, P object[T], L apiruntime.Object](
	field, resource, group string, optional bool, at func(*Objects) *[]P,
	list func(context.Context, kubernetes.Interface, metav1.ListOptions) (L, error), trim func(P),
) kind {
	return kind{
		field: field, resource: resource, group: group, optional: optional,
		list: func(ctx context.Context, client kubernetes.Interface, opts metav1.ListOptions) (apiruntime.Object, error) {
			return list(ctx, client, opts)
		},
		add: func(o *Objects, item apiruntime.Object) {
			p := item.(P)
			trimMeta(p)
			if trim != nil {
				trim(p)
			}
			*at(o) = append(*at(o), p)
		},
		sort:   func(o *Objects) { sortByName(*at(o)) },
		detach: func(o *Objects) { *at(o) = slices.Clone(*at(o)) },
		decode: func(options jsonv2.Options, first int, raw []json.RawMessage) (func(*Objects), error) {
			all, err := decodeAll[T, P](field, options, first, raw)
			return func(o *Objects) { *at(o) = append(*at(o), all...) }, err
		},
		names: func(o *Objects) []metav1.Object {
			all := make([]metav1.Object, 0, len(*at(o)))
			for _, p := range *at(o) {
				all = append(all, p)
			}
			return all
		},
	}
}

// asTheAPIServerDoes takes what the decoder of Kubernetes takes, which goes over an object twice and needs twice the time.
var asTheAPIServerDoes = jsonv2.JoinOptions(jsontext.AllowInvalidUTF8(true), jsontext.AllowDuplicateNames(true))

// decodeAll decodes objects, of which the first is at that index of its list.
func decodeAll[T any, P object[T]](field string, options jsonv2.Options, first int, raw []json.RawMessage) ([]P, error) {
	all, objects := make([]P, len(raw)), make([]T, len(raw))
	for i := range raw {
		all[i] = P(&objects[i])
		err := jsonv2.Unmarshal(raw[i], all[i], options)
		if err != nil { // what two objects share cannot be added to, and an error there does not say where it is
			all[i] = P(new(T))
			err = jsonv2.Unmarshal(raw[i], all[i], asTheAPIServerDoes)
		}
		if err != nil {
			return nil, fmt.Errorf("%s[%d] (%s): %w", field, first+i, nameIn(raw[i]), namesField(err))
		}
		if string(raw[i]) == "null" || all[i].GetName() == "" {
			return nil, fmt.Errorf("%s[%d]: metadata.name: Required value", field, first+i)
		}
	}
	return all, nil
}

// namesField says of an error of the decoder which field is wrong.
func namesField(err error) error {
	var wrong *jsonv2.SemanticError
	if !errors.As(err, &wrong) {
		return err
	}
	var field strings.Builder
	for token := range wrong.JSONPointer.Tokens() {
		switch _, notIndex := strconv.ParseUint(token, 10, 32); {
		case notIndex == nil:
			fmt.Fprintf(&field, "[%s]", token)
		case field.Len() == 0:
			field.WriteString(token)
		default:
			field.WriteString("." + token)
		}
	}
	switch {
	case wrong.Err != nil && wrong.JSONValue != nil:
		err = fmt.Errorf("%.100s: %w", wrong.JSONValue, wrong.Err)
	case wrong.Err != nil:
		err = wrong.Err
	case wrong.GoType != nil:
		err = fmt.Errorf("a JSON %s, want %s", wrong.JSONKind, wrong.GoType)
	}
	if field.Len() == 0 {
		return err
	}
	return fmt.Errorf("%s: %w", &field, err)
}

// nameIn is the name of an object that cannot be decoded, as far as it can be found.
func nameIn(raw json.RawMessage) string {
	var o struct {
		Metadata struct{ Namespace, Name string } `json:"metadata"`
	}
	if err := json.Unmarshal(raw, &o); err != nil || o.Metadata.Name == "" {
		return "its name is not legible"
	}
	return Reference(&metav1.ObjectMeta{Namespace: o.Metadata.Namespace, Name: o.Metadata.Name})
}

// All yields the objects, kind by kind.
func (o *Objects) All() iter.Seq[apiruntime.Object] {
	return func(yield func(apiruntime.Object) bool) {
		for _, k := range kinds {
			for _, object := range k.names(o) {
				if !yield(object.(apiruntime.Object)) {
					return
				}
			}
		}
	}
}
