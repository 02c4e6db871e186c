-- data/datagen/book.lua: a filter of pandoc for `datagen chunk`: of HTML, EPUB and documents the text of a book. Marks
-- of notes, links' targets, menus, pictures and raw HTML go; notes stand in the text; tables get one line a row.

local function is_mark(link) -- of a note, or the way back from it
  return link.t == 'Link' and link.target:sub(1, 1) == '#'
end

local function only(inlines, is)
  local some = false
  for _, e in ipairs(inlines) do
    if is(e) then some = true
    elseif e.t ~= 'Space' and e.t ~= 'SoftBreak' and e.t ~= 'LineBreak' then return false end
  end
  return some
end

-- A list of nothing but links is a menu or a table of contents.
local function is_menu(list)
  for _, item in ipairs(list.content) do
    for _, block in ipairs(item) do
      local text = block.t == 'Plain' or block.t == 'Para'
      local links = text and only(block.content, function(e) return e.t == 'Link' end)
      local menu = (block.t == 'BulletList' or block.t == 'OrderedList') and is_menu(block)
      if not links and not menu then return false end
    end
  end
  return #list.content > 1
end

local function list(el)
  if is_menu(el) then return {} end
end

local function table_of_lines(el)
  local simple = pandoc.utils.to_simple_table(el)
  local function flat(row)
    for i, cell in ipairs(row) do row[i] = {pandoc.Plain(pandoc.utils.blocks_to_inlines(cell, {pandoc.Space()}))} end
  end
  flat(simple.headers)
  for _, row in ipairs(simple.rows) do flat(row) end
  local space = function() return pandoc.Space() end
  return pandoc.walk_block(pandoc.utils.from_simple_table(simple), {LineBreak = space, SoftBreak = space})
end

local function content(el) return el.content end
local function nothing() return {} end

return {
  { BulletList = list, OrderedList = list },
  { Superscript = function(el) if only(el.content, is_mark) then return {} end end,
    Link = function(el)
      if is_mark(el) and pandoc.utils.stringify(el):match('^[%s↩⏎%[%]%d]*$') then return {} end
    end },
  { Span = content, Link = content, Image = function(el) return el.caption end, RawInline = nothing,
    Note = function(el)
      local note = pandoc.utils.blocks_to_inlines(el.content, {pandoc.Space()})
      note:insert(1, pandoc.Str('('))
      note:insert(1, pandoc.Space())
      note:insert(pandoc.Str(')'))
      return note
    end },
  { Div = content, RawBlock = nothing, Table = table_of_lines },
}
