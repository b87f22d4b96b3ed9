// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"errors"
	"reflect"
	"time"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// maxKnown bounds what is remembered of a type, and tried is after how many texts it has to have paid off.
const (
	maxKnown = 4096
	tried    = 512
)

// remembering returns options that decode equal texts of types that repeat from object to object once: containers of pods of one job,
// attributes of GPUs of one model. Objects share these parts, which nobody changes. One goroutine uses the options.
func remembering() jsonv2.Options {
	return jsonv2.JoinOptions(asTheAPIServerDoes, jsonv2.WithUnmarshalers(jsonv2.JoinUnmarshalers(
		once[[]v1.Container](), once[[]v1.Toleration](), once[v1.Affinity](), once[v1.NodeSelector](), once[v1.ResourceList](),
		once[resourceapi.ResourceClaimSpec](), once[map[resourceapi.QualifiedName]resourceapi.DeviceCapacity](), once[resource.Quantity](),
		attributes(), times(),
	)))
}

// errShared is what an object is refused with that gives one field twice, which would add to what others share.
var errShared = errors.New("objects share it")

// memory has what texts stand for.
type memory[T any] struct {
	known        map[string]T
	asked, found int
}

// pays tells whether enough texts have been there before.
func (m *memory[T]) pays() bool { return m.asked < tried || m.found >= m.asked/2 }

// of returns what a text stands for.
func (m *memory[T]) of(text jsontext.Value) (T, error) {
	remembers := m.pays()
	if remembers {
		m.asked++
		if same, ok := m.known[string(text)]; ok {
			m.found++
			return same, nil
		}
	}
	var value T // on the heap, so not before it is needed
	err := jsonv2.Unmarshal(text, &value, asTheAPIServerDoes)
	if err == nil && remembers && len(m.known) < maxKnown {
		m.known[string(text)] = value
	}
	return value, err
}

// once decodes equal texts once. A type whose texts are mostly different is decoded as ever.
func once[T any]() *jsonv2.Unmarshalers {
	m := memory[T]{known: map[string]T{}}
	return jsonv2.UnmarshalFromFunc(func(decoder *jsontext.Decoder, value *T) error {
		switch {
		case !reflect.ValueOf(value).Elem().IsZero():
			return errShared
		case !m.pays():
			return jsonv2.SkipFunc
		}
		text, err := decoder.ReadValue()
		if err == nil {
			*value, err = m.of(text)
		}
		return err
	})
}

// attributes decodes those of a device. Their names repeat, and so do the values of most; each device has a UUID of its own.
func attributes() *jsonv2.Unmarshalers {
	names := memory[resourceapi.QualifiedName]{known: map[string]resourceapi.QualifiedName{}}
	values := map[resourceapi.QualifiedName]*memory[resourceapi.DeviceAttribute]{}
	return jsonv2.UnmarshalFromFunc(func(decoder *jsontext.Decoder, all *map[resourceapi.QualifiedName]resourceapi.DeviceAttribute) error {
		switch {
		case *all != nil:
			return errShared
		case decoder.PeekKind() != '{':
			return jsonv2.SkipFunc
		}
		if _, err := decoder.ReadToken(); err != nil {
			return err
		}
		decoded := make(map[resourceapi.QualifiedName]resourceapi.DeviceAttribute)
		for decoder.PeekKind() != '}' {
			text, err := decoder.ReadValue()
			if err != nil {
				return err
			}
			name, err := names.of(text)
			if err != nil {
				return err
			}
			if _, twice := decoded[name]; twice {
				return errShared
			}
			if text, err = decoder.ReadValue(); err != nil {
				return err
			}
			of := values[name]
			if of == nil {
				of = &memory[resourceapi.DeviceAttribute]{known: map[string]resourceapi.DeviceAttribute{}}
				if len(values) < maxKnown {
					values[name] = of
				}
			}
			if decoded[name], err = of.of(text); err != nil {
				return err
			}
		}
		*all = decoded
		_, err := decoder.ReadToken()
		return err
	})
}

// times decodes the form in which the API server writes a time, without going over it three times as the type itself does.
func times() *jsonv2.Unmarshalers {
	return jsonv2.UnmarshalFromFunc(func(decoder *jsontext.Decoder, value *metav1.Time) error {
		text, err := decoder.ReadValue()
		if err != nil {
			return err
		}
		if len(text) > 2 && text[0] == '"' {
			if t, err := time.Parse(time.RFC3339, string(text[1:len(text)-1])); err == nil {
				value.Time = t.Local()
				return nil
			}
		}
		return value.UnmarshalJSON(text)
	})
}
